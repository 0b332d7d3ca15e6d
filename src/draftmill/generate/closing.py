"""A part that is whole -> its data files and its record."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from draftmill.contracts.cards import AsideFile, Dropped, PartRecord
from draftmill.contracts.rows import JSONL, JSONL_GZIP, JSONL_ZSTD
from draftmill.generate.figures import AnswerFigures
from draftmill.generate.part import Kind, OpenPart
from draftmill.generate.spool import Spool
from draftmill.storage.row_files import write_lines

SUFFIXES = {"none": JSONL, "gzip": JSONL_GZIP, "zstd": JSONL_ZSTD}
_RETRY = re.compile(r"-retry(\d+)\.")


@dataclass(frozen=True)
class ClosedPart:
    """The record of a part, and where its new data files lie until they are published."""

    record: PartRecord
    drafts: dict[str, Path]
    is_changed: bool
    """Whether it says something else than what is published."""


def close_part(part: OpenPart, spool: Spool, plan: str, suffix: str) -> ClosedPart:
    """Writes the part's rows in the order of its prompts, and those set aside beside them."""
    assert part.is_whole, "a part is written whole"
    return _Closing(part, spool, plan, suffix).closed()


class _Closing:
    def __init__(self, part: OpenPart, spool: Spool, plan: str, suffix: str) -> None:
        places = part.file.places()
        self._part = part
        self._spool = spool
        self._plan = plan
        self._suffix = suffix
        self._base = part.published.record if part.published else None
        # Of a part taken up again, the spool may hold what was published since.
        self._places = {row_id: places[row_id] for row_id in part.ids if row_id in places and part.concerns(row_id)}

    def closed(self) -> ClosedPart:
        """All of it."""
        name = self._file_name()
        data = write_lines(self._spool.draft(name), lambda: self._lines("row"))
        drafts = {name: data.path}
        set_aside = self._base.set_aside if self._base else None
        if any(place.entry.kind == "aside" for place in self._places.values()):
            set_aside = self._set_aside(name, drafts)
        base_figures = [AnswerFigures.read(self._base.stats)] if self._base else []
        rows = [place.entry.figures for place in self._places.values() if place.entry.kind == "row"]
        figures = AnswerFigures.total([*base_figures, *rows])
        record = PartRecord(
            name=self._part.span.name,
            file=name,
            rows_in=self._base.rows_in if self._base else len(self._part.ids) + len(self._part.left_out),
            rows=(self._base.rows if self._base else 0) + len(rows),
            tokens=figures.completion_tokens,
            bytes=data.bytes,
            sha256=data.sha256,
            plan=self._plan,
            stats=figures.as_stats(),
            dropped=self._dropped(),
            set_aside=set_aside,
            failed=tuple(self._part.failed[row_id] for row_id in self._part.ids if row_id in self._part.failed),
        )
        num_aside = record.set_aside.rows if record.set_aside else 0
        accounted = record.rows + num_aside + len(record.dropped) + len(record.failed)
        assert record.rows_in == accounted, f"{record.name}: {record.rows_in} rows in, {accounted} accounted for"
        return ClosedPart(record, drafts, is_changed=self._base is None or bool(self._places))

    def _file_name(self) -> str:
        """The data file; of a part taken up again another one, so that a record never names data that changed."""
        if self._base is None:
            return f"{self._part.span.name}{self._suffix}"
        return f"{self._part.span.name}-retry{_num_retries(self._base.file) + 1}{self._suffix}"

    def _set_aside(self, name: str, drafts: dict[str, Path]) -> AsideFile:
        """Writes the rows set aside, those of before among them."""
        aside_name = f"{name.removesuffix(self._suffix)}.aside{self._suffix}"
        written = write_lines(self._spool.draft(aside_name), lambda: self._lines("aside"))
        drafts[aside_name] = written.path
        reasons = Counter(self._base.set_aside.reasons if self._base and self._base.set_aside else {})
        reasons.update(place.entry.reason for place in self._places.values() if place.entry.reason)
        return AsideFile(
            file=aside_name,
            rows=reasons.total(),
            bytes=written.bytes,
            sha256=written.sha256,
            reasons=dict(sorted(reasons.items())),
        )

    def _dropped(self) -> tuple[Dropped, ...]:
        """All rows left out, by their place; those of a part taken up again are in its record already."""
        before = self._base.dropped if self._base else self._part.left_out
        late = [place.entry.dropped for place in self._places.values() if place.entry.dropped is not None]
        return tuple(sorted((*before, *late), key=lambda drop: (drop.file, drop.line, drop.id or "")))

    def _lines(self, kind: Kind) -> Iterator[bytes]:
        """Rows as JSON lines, in the order of the prompts: new ones, and those published before in between."""
        published = self._part.published.lines(kind) if self._part.published else iter(())
        old = next(published, None)
        for row_id in self._part.ids:
            place = self._places.get(row_id)
            if place is not None and place.entry.kind == kind:
                yield self._part.file.row(place)
            elif old is not None and _id_of(old) == row_id:
                yield old
                old = next(published, None)
        assert old is None, "every published row is one of the part's prompts"


class _Named(msgspec.Struct):
    id: str


def _id_of(line: bytes) -> str:
    try:
        return msgspec.json.decode(line, type=_Named).id
    except msgspec.DecodeError:  # half an emoji in a row set aside
        return json.loads(line)["id"]


def _num_retries(file: str) -> int:
    """How often the part of a data file was taken up again."""
    found = _RETRY.search(file)
    return int(found[1]) if found else 0


def earlier_files(record: PartRecord) -> list[str]:
    """Data files that a part had before it was taken up again."""
    suffix = record.file[record.file.index(".") :]
    stems = [record.name, *(f"{record.name}-retry{n}" for n in range(1, _num_retries(record.file)))]
    named = {file for file, _ in record.files}
    earlier = [f"{stem}{kind}{suffix}" for stem in stems for kind in ("", ".aside")]
    return [file for file in earlier if file not in named] if _num_retries(record.file) else []
