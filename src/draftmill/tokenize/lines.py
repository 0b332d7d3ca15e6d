"""The lines of a piece of a JSON-lines file, plain or compressed, numbered and in chunks of a few megabytes.

Which lines make a chunk depends on the lines alone, not on how the file was cut, compressed or read.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pyarrow as pa

from draftmill.contracts.errors import StorageError
from draftmill.contracts.rows import JSONL, JSONL_GZIP, JSONL_ZSTD
from draftmill.storage.local import reason, version_of

CHUNK_BYTES = 4 << 20
_BLOCK_BYTES = 4 << 20
_BROKEN = (EOFError, OSError, zlib.error, pa.ArrowException)


class LocalPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece as a worker reads it: bytes `start..stop` of a local file."""

    path: str
    key: str
    """The file's name in the source; its suffix says how it is compressed."""
    start: int
    stop: int
    version: str
    """What `version_of` has to say of the file before and after; empty for a copy of our own."""


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive lines with their numbers (from 1, in the piece), blank ones left out."""

    lines: list[tuple[int, bytes]]
    read_bytes: int
    """Bytes of the piece, as stored, that were read since the chunk before."""
    last_line: int
    """How many lines of the piece have been passed."""


def line_chunks(piece: LocalPiece) -> Iterator[Chunk]:
    """The piece's lines, cut at byte 0x0A alone: U+2028 and its like are text. The last chunk may hold none.

    StorageError where the file was changed since it was listed, or where compressed data break off.
    """
    _refuse_changed(piece)
    lines, size, number, read = list[tuple[int, bytes]](), 0, 0, 0
    with _opened(piece) as blocks:
        for line in _lines(piece, blocks):
            number += 1
            if line and not line.isspace():
                lines.append((number, line))
                size += len(line)
            if size >= CHUNK_BYTES:
                position = blocks.position()
                yield Chunk(lines, position - read, number)
                lines, size, read = [], 0, position
    _refuse_changed(piece)
    yield Chunk(lines, piece.stop - piece.start - read, number)


def _refuse_changed(piece: LocalPiece) -> None:
    if piece.version and version_of(Path(piece.path)) != piece.version:
        raise StorageError(
            f"{piece.path} was changed after it was listed, so rows before and after the change would be mixed: "
            "leave inputs alone while they are read, and run the same command again"
        )


class _Blocks:
    """A piece's text in blocks, and how many of its stored bytes have been read."""

    def __init__(self, raw: io.BufferedReader, text: io.IOBase, piece: LocalPiece) -> None:
        self._raw, self._text, self._piece = raw, text, piece

    def position(self) -> int:
        return min(self._raw.tell(), self._piece.stop) - self._piece.start

    def __iter__(self) -> Iterator[bytes]:
        left = self._piece.stop - self._piece.start if self._piece.key.endswith(JSONL) else None
        while left is None or left > 0:
            block = self._text.read(_BLOCK_BYTES if left is None else min(left, _BLOCK_BYTES))
            if not block:
                return
            yield block
            left = None if left is None else left - len(block)


@contextmanager
def _opened(piece: LocalPiece) -> Iterator[_Blocks]:
    """By the key's suffix: a downloaded piece's path has none."""
    with _file(piece.path) as raw:
        if piece.start:
            raw.seek(piece.start)
        yield _Blocks(raw, _decompressed(raw, piece.key), piece)


def _file(path: str) -> io.BufferedReader:
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {reason(error)}") from error


def _decompressed(raw: io.BufferedReader, key: str) -> io.IOBase:
    if key.endswith(JSONL_GZIP):
        return gzip.GzipFile(fileobj=raw)
    if key.endswith(JSONL_ZSTD):
        return pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
    return raw


def _lines(piece: LocalPiece, blocks: _Blocks) -> Iterator[bytes]:
    """Every line without its end; the last one may have none."""
    begun: list[bytes] = []
    count = 0
    try:
        for block in blocks:
            first, *others = block.split(b"\n")
            begun.append(first)
            for line in others:
                count += 1
                yield b"".join(begun)
                begun = [line]
    except _BROKEN as error:
        raise StorageError(_broken(piece, count, error)) from error
    if last := b"".join(begun):
        yield last


def _broken(piece: LocalPiece, count: int, error: Exception) -> str:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    if piece.key.endswith(JSONL):
        return f"{piece.path} cannot be read after line {count:,}: {said}"
    kind = "gzip" if piece.key.endswith(JSONL_GZIP) else "zstd"
    return (
        f"{piece.key}: its {kind} data break off or are damaged after line {count:,} ({said}): "
        "fetch the file again or compress it again, then run the same command"
    )
