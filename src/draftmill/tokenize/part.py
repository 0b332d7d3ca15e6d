"""One part: the pieces of input it is made of -> an Arrow shard and its record. A pure function of its job.

What it needs is paths and numbers, so any scheduler can run it; nothing here knows of workers or of other parts.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from draftmill.contracts.cards import Dropped, PartRecord
from draftmill.contracts.rows import RowError, read_row
from draftmill.settings.tokenize import Turns
from draftmill.storage.fetch import local_copy
from draftmill.storage.store import open_store, sha256_of
from draftmill.tokenize.figures import repeats, total
from draftmill.tokenize.lines import piece_lines
from draftmill.tokenize.rows import RowBatch, RowMaker, RowMakerSpec, samples_of
from draftmill.tokenize.samples import Sample
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
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


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
        self.rows = RowMaker(RowMakerSpec(craft.tokenizer, craft.turns, craft.max_tokens, craft.template_kwargs))

    def scan(self, job: PartJob) -> NDArray[np.uint64]:
        """A 64-bit hash of each row's id, in order; 0 for a row that cannot be read."""
        return np.fromiter((_id_hash(line) for _, _, line in self._lines(job)), np.uint64)

    def make(self, job: PartJob, on_rows: Callable[[int], None]) -> PartRecord:
        """Writes the part's shard into the spool; returns its record. Tells `on_rows` of rows as they are done."""
        path, made = self.craft.spool / f"{job.name}.arrow", list[RowBatch]()
        rows = write_shard(path, self._counted(job, made, on_rows))
        figures = total(batch.stats for batch in made)
        figures.duplicate_samples = repeats(
            np.concatenate([np.empty(0, np.uint64), *(batch.fingerprints for batch in made)])
        )
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
            dropped=tuple(drop for batch in made for drop in batch.dropped),
        )

    def _counted(self, job: PartJob, made: list[RowBatch], on_rows: Callable[[int], None]) -> Iterator[list[Sample]]:
        """The samples of each row that is kept, a row at a time; `made` keeps what else is known of it."""
        for row_number, (file, line_number, line) in enumerate(self._lines(job)):
            on_rows(1)
            batch = self.rows.make([(line_number, line)], file)
            if row_number in job.repeats and _id_hash(line) != _UNREADABLE:
                batch = self.rows.make([], file)
                batch.dropped.append(Dropped(file=file, line=line_number, id=read_row(line).id, reason=DUPLICATE))
                batch.stats.rows = batch.stats.duplicate_rows = 1
            made.append(batch)
            if batch.sample_ids:
                yield samples_of(batch)

    def _lines(self, job: PartJob) -> Iterator[tuple[str, int, bytes]]:
        for piece in job.pieces:
            path = local_copy(self.store, piece.file)
            for number, line in piece_lines(path, piece):
                yield piece.file.key, number, line


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
