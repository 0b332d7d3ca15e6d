"""Closes parts in the plan's order: repeated ids, repeated content and line numbers depend on the parts before.

A part is made without knowing them, so that parts can be made side by side. When all earlier ones are known, the
ledger says which of its rows repeat an id of theirs (the part is then made once more without these rows), and closes
its record.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from draftmill.contracts.cards import PartRecord, PlannedPart, canonical_json
from draftmill.tokenize.figures import figures_of
from draftmill.tokenize.pieces import Piece

Hashes = NDArray[np.uint64]
UNREADABLE = 0
ROWS = ".rows"
"""Ending of the file that is kept of a part for those that come after it."""


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A part as its maker leaves it: kept beside the part, so that later parts can be closed by another run."""

    record: PartRecord
    """As it is where no earlier part has an id of its rows; line numbers count from the start of each piece."""
    row_ids: bytes
    """Of each row read, 64 bits that tell its id from others; 0 where it could not be read."""
    fingerprints: bytes
    """Of each sample, 64 bits that tell its tokens from others'."""
    lines: tuple[int, ...]
    """Lines of each piece."""

    @property
    def id_hashes(self) -> Hashes:
        """`row_ids` as numbers."""
        return np.frombuffer(self.row_ids, np.uint64)


def made_file(name: str) -> str:
    """The file name of what is kept of a part for those that come after it."""
    return f"{name}{ROWS}"


def unmade(open_parts: Sequence[PlannedPart], sizes: Sequence[Mapping[str, int]]) -> list[str]:
    """Those of the parts without a record that nobody has made, by what each store holds. Made ones wait to be closed
    until those ahead of them are."""
    return [part.name for part in open_parts if any(made_file(part.name) not in there for there in sizes)]


def encode_made(made: Made) -> bytes:
    """The file's bytes."""
    return msgspec.msgpack.encode(made, order="sorted")


def decode_made(data: bytes | None, plan: str) -> Made | None:
    """What the file holds; None where there is none, or where it is damaged or of another plan."""
    try:
        made = msgspec.msgpack.decode(data or b"", type=Made)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return made if made.record.plan == plan else None


class Ledger:
    """What the closed parts have held so far."""

    def __init__(self) -> None:
        self._ids = _Seen()
        self._fingerprints = _Seen()
        self._lines: dict[str, int] = defaultdict(int)

    def repeated_rows(self, made: Made) -> tuple[int, ...]:
        """Rows of the next part (numbered from 0) whose id some closed part has."""
        hashes = made.id_hashes
        return tuple(np.flatnonzero(self._ids.holds(hashes) & (hashes != UNREADABLE)).tolist())

    def close(self, made: Made, pieces: Sequence[Piece]) -> PartRecord:
        """Closes the next part; its record counts lines from the start of each file."""
        prints = np.frombuffer(made.fingerprints, np.uint64)
        stats = figures_of(made.record)
        stats.duplicate_samples = int(np.count_nonzero(self._fingerprints.repeated(prints)))
        record = msgspec.structs.replace(
            made.record,
            stats=msgspec.to_builtins(stats, str_keys=True),
            dropped=tuple(
                msgspec.structs.replace(drop, line=drop.line + before)
                for drop, before in zip(made.record.dropped, self._lines_before(made, pieces), strict=True)
            ),
        )
        self._ids.add(made.id_hashes)
        self._fingerprints.add(prints)
        for piece, count in zip(pieces, made.lines, strict=True):
            self._lines[piece.file.key] += count
        return msgspec.json.decode(canonical_json(record), type=PartRecord)

    def _lines_before(self, made: Made, pieces: Sequence[Piece]) -> list[int]:
        """Just a part's first piece can go on with a file that an earlier part began."""
        first = pieces[0].file.key
        return [self._lines[first] if drop.file == first else 0 for drop in made.record.dropped]


class _Seen:
    """A growing set of 64-bit numbers: 8 bytes each, in a few sorted runs of doubling size."""

    def __init__(self) -> None:
        self._runs: list[Hashes] = []

    def holds(self, numbers: Hashes) -> NDArray[np.bool_]:
        """Which of the numbers are in the set."""
        found = np.zeros(len(numbers), np.bool_)
        for run in self._runs:
            at = np.searchsorted(run, numbers)
            found |= run[np.minimum(at, len(run) - 1)] == numbers
        return found

    def repeated(self, numbers: Hashes) -> NDArray[np.bool_]:
        """Which of the numbers are in the set, or stand among `numbers` before."""
        found = np.ones(len(numbers), np.bool_)
        found[np.unique(numbers, return_index=True)[1]] = False
        return found | self.holds(numbers)

    def add(self, numbers: Hashes) -> None:
        """Puts the numbers into the set."""
        run = np.unique(numbers)
        while self._runs and len(self._runs[-1]) <= len(run):
            run = np.union1d(run, self._runs.pop())
        if len(run):
            self._runs.append(run)
