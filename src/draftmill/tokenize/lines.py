"""The lines of a piece of a JSON-lines file, plain or compressed, with their numbers in the file."""

import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pyarrow as pa

from draftmill.tokenize.source import GZIP, PLAIN, ZSTD, Piece

_CHUNK_BYTES = 1 << 22


def piece_lines(path: Path, piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Lines that begin inside the piece, numbered from 1 in their file; blank ones are passed over.

    They are cut at byte 0x0A alone: U+2028 and its like are text. `path` holds the piece's whole file.
    """
    with _opened(path, piece.file.key) as stream:
        number = _skip_to(stream, piece.start)
        is_plain = piece.file.key.endswith(PLAIN)
        while not is_plain or stream.tell() < piece.stop:
            line = stream.readline()
            if not line:
                return
            number += 1
            if line.strip():
                yield number, line.rstrip(b"\n")


def _opened(path: Path, key: str) -> io.BufferedIOBase:
    """By the key's suffix: a cached object's path has none."""
    if key.endswith(GZIP):
        return gzip.open(path, "rb")
    if key.endswith(ZSTD):
        stream = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")
        return io.BufferedReader(cast(io.RawIOBase, stream))
    return path.open("rb")


def _skip_to(stream: io.BufferedIOBase, start: int) -> int:
    """Moves to the first line that begins at or after byte `start`; how many lines lie before it."""
    if start == 0:
        return 0
    count, left = 0, start - 1
    while left:
        chunk = stream.read(min(left, _CHUNK_BYTES))
        count, left = count + chunk.count(b"\n"), left - len(chunk)
    stream.readline()  # the line that covers byte start - 1 belongs to the piece before
    return count + 1
