"""Files of rows, streamed: `.jsonl`, `.jsonl.gz`, `.jsonl.zst` and `.parquet`, local or in an object store.

A row comes as a numbered JSON line (a Parquet row as the JSON it would be), cut at byte 0x0A alone: U+2028 and its
like are text. Nothing is read whole, so that memory does not grow with the file.
"""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import msgspec
import zstandard

from draftmill.contracts.cards import InputFile
from draftmill.contracts.errors import InputError, RecipeError, StorageError
from draftmill.contracts.rows import JSONL_GZIP, JSONL_SUFFIXES, JSONL_ZSTD
from draftmill.storage.fetch import SHA256, local_copy
from draftmill.storage.store import find_store, sha256_of, split_url

PARQUET = ".parquet"
ROW_SUFFIXES = (*JSONL_SUFFIXES, PARQUET)
_PARQUET_ROWS = 256
# Text and ids pack to about a third at either level; zstd takes 5 ms a megabyte for it, gzip ten times as long.
_ZSTD_LEVEL, _GZIP_LEVEL = 3, 6
# Arrow gives up on a date beyond Python's, and on forms of nesting that it cannot read, each in its own way.
_UNREADABLE = (OSError, EOFError, zlib.error, ValueError, OverflowError, NotImplementedError)


@dataclass(frozen=True)
class RowFile:
    """One file: how a plan names it, and a local path with its bytes."""

    file: InputFile
    path: Path

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Rows as JSON lines without their line end, numbered from 1; blank lines are numbered but no rows."""
        return numbered_lines(self.path, self.file.key)


def find_row_file(url: str) -> RowFile:
    """The file at a URL, an object fetched into the cache once; InputError or RecipeError where there is none.

    It is named without its folder and identified by its content, so that a moved file is the same input.
    """
    if not url.endswith(ROW_SUFFIXES):
        raise RecipeError(f"{url}: rows are read from {', '.join(ROW_SUFFIXES)} files")
    folder, name = split_url(url)
    store = find_store(folder)
    listed = store.stat(name) if store else None
    if store is None or listed is None:
        raise InputError(f"{url}: no such file; name {', '.join(ROW_SUFFIXES)} files of rows")
    path = local_copy(store, listed)
    return RowFile(InputFile(key=name, size=listed.size, identity=SHA256 + sha256_of(path)), path)


def find_row_files(urls: Sequence[str]) -> tuple[RowFile, ...]:
    """The files, each under a name of its own; RecipeError where one is given twice."""
    if not urls:
        return ()
    if len(set(urls)) < len(urls):
        raise RecipeError(f"an input is given twice: {', '.join(sorted({u for u in urls if urls.count(u) > 1}))}")
    files = [find_row_file(url) for url in urls]
    return tuple(
        RowFile(InputFile(key=key, size=file.file.size, identity=file.file.identity), file.path)
        for key, file in zip(_distinct_names(urls), files, strict=True)
    )


def _distinct_names(urls: Sequence[str]) -> list[str]:
    """File names, with as many of their folders as it takes to tell them apart."""
    for depth in range(1, max(url.count("/") for url in urls) + 2):
        names = ["/".join(url.split("/")[-depth:]) for url in urls]
        if len(set(names)) == len(names):
            return names
    raise RecipeError(f"the inputs {', '.join(urls)} cannot be told apart")


def numbered_lines(path: Path, key: str) -> Iterator[tuple[int, bytes]]:
    """As `RowFile.lines`; `key` says by its suffix what `path` holds. InputError where it is cut or something else."""
    try:
        if key.endswith(PARQUET):
            yield from _parquet_rows(path)
            return
        with _opened(path, key) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line.rstrip(b"\r\n")
    except _UNREADABLE as error:
        raise InputError(f"{path} cannot be read to its end as {Path(key).name}: {error}; fetch it again") from error


def _opened(path: Path, key: str) -> io.BufferedIOBase:
    if key.endswith(JSONL_GZIP):
        return gzip.open(path, "rb")
    if key.endswith(JSONL_ZSTD):
        import pyarrow as pa  # 50 MB that a run over plain files does without

        # Arrow's reader goes on over several frames and refuses a cut one; zstandard's does neither by itself.
        stream = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")
        return io.BufferedReader(cast(io.RawIOBase, stream), 1 << 16)
    return path.open("rb")


def _parquet_rows(path: Path) -> Iterator[tuple[int, bytes]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    with pq.ParquetFile(path) as file:
        # Nanoseconds become Python objects through pandas alone: as text, or as their number, they say as much.
        plain = {"duration[ns]": pa.int64(), "timestamp[ns": pa.string(), "time64[ns]": pa.string()}
        schema = pa.schema(
            field.with_type(next((to for kind, to in plain.items() if str(field.type).startswith(kind)), field.type))
            for field in file.schema_arrow
        )
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
            for row in batch.cast(schema).to_pylist():
                number += 1
                yield number, msgspec.json.encode(row, enc_hook=str)


@dataclass(frozen=True)
class WrittenFile:
    """A local file, its size and the sha256 of its bytes."""

    path: Path
    bytes: int
    sha256: str


def write_lines(path: Path, make_lines: Callable[[], Iterator[bytes]]) -> WrittenFile:
    """Writes lines into a file whose suffix says how it is compressed: the same lines, the same bytes.

    They are asked for twice, so that a compressed file says how large it is without, and readers in one go can read it.
    """
    num_bytes = sum(map(len, make_lines()))
    try:
        with path.open("wb") as file, _packed(file, path.name, num_bytes) as stream:
            for line in make_lines():
                stream.write(line)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written ({error.strerror}): make room there, then run again") from error
    return WrittenFile(path, path.stat().st_size, sha256_of(path))


@contextmanager
def _packed(file: IO[bytes], name: str, num_bytes: int) -> Iterator[IO[bytes]]:
    if name.endswith(JSONL_GZIP):
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=_GZIP_LEVEL, mtime=0) as packed:
            yield cast(IO[bytes], packed)
    elif name.endswith(JSONL_ZSTD):
        packer = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True, write_content_size=True)
        with packer.stream_writer(file, size=num_bytes, closefd=False) as packed:
            yield cast(IO[bytes], packed)
    else:
        yield file
