"""One part: the pieces of input it is made of -> an Arrow shard and what is known of its rows. A pure function.

What it needs is paths and numbers, so any scheduler can run it; nothing here knows of workers or of other parts.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from draftmill.contracts.cards import Dropped, PartRecord
from draftmill.contracts.rows import RowError, read_row
from draftmill.tokenize.figures import PartStats, figures_of, total
from draftmill.tokenize.ledger import UNREADABLE, Made
from draftmill.tokenize.lines import Chunk, LocalPiece, line_chunks
from draftmill.tokenize.rows import Line, RowBatch
from draftmill.tokenize.shards import ShardWriter

DUPLICATE = "duplicate id"

logger = logging.getLogger(__name__)


@runtime_checkable
class MakesRows(Protocol):
    """A RowMaker, or what stands for one."""

    def make(self, lines: Sequence[Line], file: str, *, careful: bool = False) -> RowBatch:
        """The samples of a chunk of the lines of `file`."""
        ...


MakeRows = Callable[[Sequence[Line], str], RowBatch]
OnRead = Callable[[int, int], None]
"""Told of progress: bytes of input read and rows done since the last call."""


class PartJob(msgspec.Struct, frozen=True, kw_only=True):
    """One part to make."""

    name: str
    plan: str
    pieces: tuple[LocalPiece, ...]
    shard: str
    """Local path of the shard to be written."""
    repeats: tuple[int, ...] = ()
    """Rows of this part (numbered from 0) whose id an earlier part has."""


def shard_file(name: str, repeats: Sequence[int]) -> str:
    """A shard's name in the set. One without the rows that repeat earlier parts' has a name of its own, so that a name
    always stands for the same bytes, whoever writes them.
    """
    return f"{name}-once.arrow" if repeats else f"{name}.arrow"


def make_part(rows: MakesRows, job: PartJob, on_read: OnRead) -> Made:
    """Writes the part's shard; returns what is known of it. Made again, carefully, where a checked row differs."""
    made = _make(rows.make, job, on_read)
    stats = figures_of(made.record)
    if stats.differing:
        logger.warning("%s: %d checked rows differ, so it is made again with the reference", job.name, stats.differing)
        made = _make(partial(rows.make, careful=True), job, lambda read, rows: on_read(0, 0))
        careful = figures_of(made.record)
        careful.differing = stats.differing
        record = msgspec.structs.replace(made.record, stats=msgspec.to_builtins(careful, str_keys=True))
        made = msgspec.structs.replace(made, record=record)
    return made


def _make(make_rows: MakeRows, job: PartJob, on_read: OnRead) -> Made:
    part, lines = _Part(make_rows, job), []
    with ShardWriter(Path(job.shard)) as shard:
        for piece in job.pieces:
            last_line = 0
            for chunk in line_chunks(piece):
                shard.add(part.add(chunk, piece.key))
                on_read(chunk.read_bytes, len(chunk.lines))
                last_line = chunk.last_line
            lines.append(last_line)
    return Made(
        record=part.record(shard),
        row_ids=np.array(part.id_hashes, np.uint64).tobytes(),
        fingerprints=np.concatenate([np.empty(0, np.uint64), *part.fingerprints]).tobytes(),
        lines=tuple(lines),
    )


class _Part:
    """A part in the making: what has been seen of its rows."""

    def __init__(self, make_rows: MakeRows, job: PartJob) -> None:
        self._make_rows, self._job = make_rows, job
        self._known = frozenset(job.repeats)
        self._seen: set[int] = set()
        self._dropped: list[Dropped] = []
        self._stats: list[PartStats] = []
        self.id_hashes: list[int] = []
        self.fingerprints: list[np.ndarray] = []

    def add(self, chunk: Chunk, file: str) -> RowBatch:
        """The samples of the chunk's rows, each id once."""
        first = len(self.id_hashes)
        repeated = {i for i in range(len(chunk.lines)) if first + i in self._known} if self._known else set()
        batch = self._make_rows(_without(chunk.lines, repeated), file)
        hashes = _spread(map(_id_hash, batch.row_ids), repeated, chunk.lines)
        if more := self._new_repeats(hashes, repeated):
            repeated |= more
            batch = self._make_rows(_without(chunk.lines, repeated), file)
        self._note(batch, [_repeat(chunk.lines[i], file) for i in sorted(repeated)], hashes)
        return batch

    def _new_repeats(self, hashes: list[int], repeated: set[int]) -> set[int]:
        """Rows whose id an earlier row of this part has; remembers the others'."""
        fresh = set(hashes)
        if len(fresh) == len(hashes) and not repeated and UNREADABLE not in fresh and fresh.isdisjoint(self._seen):
            self._seen |= fresh  # as nearly always
            return set()
        found = set()
        for i, number in enumerate(hashes):
            if number == UNREADABLE or i in repeated:
                continue
            if number in self._seen:
                found.add(i)
            self._seen.add(number)
        return found

    def _note(self, batch: RowBatch, repeats: list[Dropped], hashes: list[int]) -> None:
        self.id_hashes += hashes
        self.fingerprints.append(batch.fingerprints)
        self._dropped += sorted([*batch.dropped, *repeats], key=lambda drop: drop.line)
        self._stats += [batch.stats, PartStats(rows=len(repeats), duplicate_rows=len(repeats))]

    def record(self, shard: ShardWriter) -> PartRecord:
        """The part's record, its shard written."""
        rows_in, stats = len(self.id_hashes), total(self._stats)
        assert stats.rows == rows_in, "every row is counted once"
        return PartRecord(
            name=self._job.name,
            file=shard_file(self._job.name, self._job.repeats),
            rows_in=rows_in,
            rows=rows_in - len(self._dropped),
            tokens=stats.tokens,
            bytes=shard.bytes,
            sha256=shard.sha256,
            plan=self._job.plan,
            stats=msgspec.to_builtins(stats, str_keys=True),
            dropped=tuple(self._dropped),
        )


def _without(lines: list[Line], left_out: set[int]) -> list[Line]:
    return [line for i, line in enumerate(lines) if i not in left_out] if left_out else lines


def _spread(hashes: Iterable[int], repeated: set[int], lines: list[Line]) -> list[int]:
    """A hash for every line: of those that were made in turn, of those that were not by reading their id."""
    if not repeated:
        return list(hashes)
    made = iter(hashes)
    return [_id_hash(_id_of(line)) if i in repeated else next(made) for i, (_, line) in enumerate(lines)]


def _id_hash(row_id: str | None) -> int:
    if row_id is None:
        return UNREADABLE
    return int.from_bytes(hashlib.blake2b(row_id.encode(), digest_size=8).digest(), "little") or 1


def _id_of(line: bytes) -> str | None:
    try:
        return read_row(line).id
    except RowError as error:
        return error.row_id


def _repeat(line: Line, file: str) -> Dropped:
    return Dropped(file=file, line=line[0], id=_id_of(line[1]), reason=DUPLICATE)
