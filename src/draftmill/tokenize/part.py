"""One part: the pieces of input it is made of -> an Arrow shard and its record. A pure function of its job.

What it needs is paths and numbers, so any scheduler can run it; nothing here knows of workers or of other parts.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from draftmill.contracts.cards import Dropped, PartRecord
from draftmill.contracts.rows import Row, RowError, read_row
from draftmill.settings.tokenize import Turns
from draftmill.storage.fetch import local_copy
from draftmill.storage.store import open_store, sha256_of
from draftmill.tokenize.figures import Tally
from draftmill.tokenize.lines import piece_lines
from draftmill.tokenize.samples import Sample, SampleMaker, open_sample_maker
from draftmill.tokenize.shards import write_shard
from draftmill.tokenize.source import Piece

DUPLICATE = "duplicate id"
_UNREADABLE = 0


@dataclass(frozen=True)
class Craft:
    """What all parts of a set have in common; small and picklable, for it travels to every worker."""

    url: str
    tokenizer: Path
    turns: Turns
    max_tokens: int
    plan: str
    spool: Path
    """Local folder for finished shards until they are published."""


@dataclass(frozen=True)
class PartJob:
    """One part to make."""

    name: str
    pieces: tuple[Piece, ...]
    repeats: frozenset[int] = frozenset()
    """Rows of this part (numbered from 0) whose id an earlier row of the set has."""


class PartMaker:
    """Makes parts one after the other, with one tokenizer."""

    def __init__(self, craft: Craft) -> None:
        self.craft = craft
        self.store = open_store(craft.url)
        self.samples_of: SampleMaker = open_sample_maker(craft.tokenizer, craft.turns, craft.max_tokens)

    def scan(self, job: PartJob) -> NDArray[np.uint64]:
        """A 64-bit hash of each row's id, in order; 0 for a row that cannot be read."""
        return np.fromiter((_id_hash(line) for _, _, line in self._lines(job)), np.uint64)

    def make(self, job: PartJob, on_rows: Callable[[int], None]) -> PartRecord:
        """Writes the part's shard into the spool; returns its record. Tells `on_rows` of rows as they are done."""
        path, tally, dropped = self.craft.spool / f"{job.name}.arrow", Tally(), list[Dropped]()
        rows = write_shard(path, self._counted(job, tally, dropped, on_rows))
        repeats = sum(drop.reason == DUPLICATE for drop in dropped)
        figures = tally.figures(rows=rows + len(dropped), dropped=len(dropped) - repeats, duplicate_rows=repeats)
        return PartRecord(
            name=job.name,
            file=path.name,
            rows_in=figures.rows,
            rows=rows,
            tokens=figures.tokens,
            bytes=path.stat().st_size,
            sha256=sha256_of(path),
            plan=self.craft.plan,
            stats=msgspec.to_builtins(figures, str_keys=True),
            dropped=tuple(dropped),
        )

    def _counted(
        self, job: PartJob, tally: Tally, dropped: list[Dropped], on_rows: Callable[[int], None]
    ) -> Iterator[list[Sample]]:
        """The samples of each row that is kept; counts them, and lists the rows that are not."""
        for row_number, (file, line_number, line) in enumerate(self._lines(job)):
            on_rows(1)
            try:
                samples = self._samples(line, is_repeat=row_number in job.repeats)
            except RowError as error:
                dropped.append(Dropped(file=file, line=line_number, id=error.row_id, reason=error.reason))
                continue
            for sample in samples:
                tally.add(sample.input_ids, sample.loss_mask, truncated=sample.truncated)
            yield samples

    def _lines(self, job: PartJob) -> Iterator[tuple[str, int, bytes]]:
        for piece in job.pieces:
            path = local_copy(self.store, piece.file)
            for number, line in piece_lines(path, piece):
                yield piece.file.key, number, line

    def _samples(self, line: bytes, *, is_repeat: bool) -> list[Sample]:
        row: Row | None = None
        try:
            row = read_row(line)
            if is_repeat:
                raise RowError(DUPLICATE)
            return self.samples_of(row)
        except RowError as error:
            error.row_id = error.row_id or (row.id if row else None)
            raise


def _id_hash(line: bytes) -> int:
    try:
        row_id = read_row(line).id
    except RowError:
        return _UNREADABLE
    return int.from_bytes(hashlib.blake2b(row_id.encode(), digest_size=8).digest(), "big")


def find_repeats(scans: Iterable[tuple[PartJob, NDArray[np.uint64]]]) -> tuple[list[PartJob], dict[str, int]]:
    """Every job with its repeated rows (the first row of an id, in the plan's order, stays), and its number of rows."""
    in_order = sorted(scans, key=lambda scan: scan[0].name)
    hashes = np.concatenate([hashes for _, hashes in in_order])
    repeats = np.ones(len(hashes), np.bool_)
    repeats[np.unique(hashes, return_index=True)[1]] = False
    ends = np.cumsum([len(hashes) for _, hashes in in_order])
    jobs = [
        replace(job, repeats=frozenset(np.flatnonzero(own).tolist()))
        for (job, _), own in zip(in_order, np.split(repeats, ends[:-1]), strict=True)
    ]
    return jobs, {job.name: len(hashes) for job, hashes in in_order}
