"""What a part is made of: whole files, and stretches of large plain ones that begin and end with a line.

A shard's bytes are foretold from the sizes of its inputs, so that the plan is fixed before the first row is read.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from draftmill.contracts.cards import InputFile, part_name
from draftmill.contracts.rows import JSONL, JSONL_GZIP, JSONL_ZSTD

# Bytes of a shard for one byte of input: a token takes 4.13 bytes there and about 3.5 in JSON lines (measured over
# code, mathematics and prose in 26 languages); gzip squeezes such text to about a third, zstd to a little less.
_SHARD_BYTES_PER_BYTE = {JSONL: 1.2, JSONL_GZIP: 3.6, JSONL_ZSTD: 3.8}
# Read around a cut to find the end of its line; a longer line takes several reads.
_LINE_BYTES = 1 << 16
_READERS = 16

ReadSpan = Callable[[int, int], bytes]
"""Bytes `start..stop` of a file, fewer at its end."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes `start..stop` (half-open) of one file: whole lines. A compressed file is one piece."""

    file: InputFile
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The key, with its byte range where the piece is not the whole file."""
        is_whole = (self.start, self.stop) == (0, self.file.size)
        return self.file.key if is_whole else f"{self.file.key}[{self.start}:{self.stop}]"

    @property
    def shard_bytes(self) -> int:
        """What its samples are expected to take in a shard."""
        return shard_bytes(self.file.key, self.stop - self.start)


@dataclass(frozen=True)
class PartInputs:
    """One part as planned: what it is made of, in order."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def input_bytes(self) -> int:
        """Bytes to be read, as stored."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def local_bytes(self) -> int:
        """What it is expected to take of the local disk, inputs and shard together."""
        return self.input_bytes + sum(piece.shard_bytes for piece in self.pieces)


def shard_bytes(key: str, size: int) -> int:
    """Bytes that `size` bytes of a file are expected to become in a shard."""
    return round(size * next(ratio for suffix, ratio in _SHARD_BYTES_PER_BYTE.items() if key.endswith(suffix)))


def cut_parts(pieces: Sequence[Piece], part_bytes: int) -> tuple[PartInputs, ...]:
    """The parts, in order, each of as many pieces as are expected to fill a shard of `part_bytes`, at least one."""
    parts: list[list[Piece]] = []
    filled = part_bytes
    for piece in pieces:
        if not parts or filled + piece.shard_bytes > part_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(piece)
        filled += piece.shard_bytes
    return tuple(PartInputs(part_name(i), tuple(part)) for i, part in enumerate(parts))


def pieces_of(file: InputFile, part_bytes: int, read: ReadSpan) -> Iterator[Piece]:
    """The file, or, where it is plain and larger than a part, stretches of it of about one part each."""
    edges = [0, file.size]
    if file.key.endswith(JSONL):
        step = max(1, round(part_bytes / _SHARD_BYTES_PER_BYTE[JSONL]))
        edges = [0, *line_starts(range(step, file.size, step), file.size, read), file.size]
    for start, stop in itertools.pairwise(edges):
        if start < stop:
            yield Piece(file=file, start=start, stop=stop)


def line_starts(cuts: Sequence[int], size: int, read: ReadSpan) -> list[int]:
    """The first line start at or after each byte position of `cuts`; none where a line goes on to the next cut."""
    with ThreadPoolExecutor(_READERS) as readers:
        found = readers.map(lambda cut, end: _line_start(cut, end, read), cuts, [*cuts[1:], size])
        return [start for start in found if start is not None]


def _line_start(cut: int, end: int, read: ReadSpan) -> int | None:
    at = cut - 1  # a line that ends with the byte before the cut leaves the cut where it is
    while at < end:
        block = read(at, min(at + _LINE_BYTES, end))
        found = block.find(b"\n")
        if found >= 0:
            return at + found + 1
        at += max(len(block), 1)
    return None
