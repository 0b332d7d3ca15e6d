"""What tokenize reads: a set made by generate, or a bare folder or file listed once; cut into the parts to make."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from draftmill.contracts.cards import CARD_FILE, PLAN_FILE, InputFile
from draftmill.contracts.errors import InputError, StorageError
from draftmill.storage.fetch import SHA256
from draftmill.storage.sets import open_set
from draftmill.storage.store import Store, open_store, sha256_of

PLAIN, GZIP, ZSTD = SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


@dataclass(frozen=True)
class Source:
    """The files to read, in order, and what their producer's card says (empty for a bare listing)."""

    store: Store
    files: tuple[InputFile, ...]
    card: dict[str, Any]


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of one file that begin in bytes `start..stop` (half-open). A compressed file is one piece."""

    file: InputFile
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The key, with its byte range where the piece is not the whole file."""
        is_whole = (self.start, self.stop) == (0, self.file.size)
        return self.file.key if is_whole else f"{self.file.key}[{self.start}:{self.stop}]"


def open_source(url: str) -> Source:
    """The input's files; InputError where there are none, StorageError where a set is unfinished."""
    if url.endswith(SUFFIXES):
        folder, _, name = url.rpartition("/")
        store = open_store(folder or ".")
        return _listed(store, name, url)
    store = open_store(url)
    if store.find(PLAN_FILE) is not None:
        made = open_set(url, "generate")
        return Source(made.store, made.inputs, {"plan": made.plan.hash, **made.card.content})
    if store.find(CARD_FILE) is not None:
        raise StorageError(f"{url} holds a {CARD_FILE} but no {PLAN_FILE}: part of a set is missing")
    return _listed(store, None, url)


def _listed(store: Store, name: str | None, url: str) -> Source:
    """The one file `name`, or every file of JSON lines.

    Local files are identified by content, so that a copied folder is the same input; objects by their etag.
    """
    files = [f for f in store.files() if f.key == name or (name is None and f.key.endswith(SUFFIXES))]
    if not files:
        raise InputError(f"{url}: no {', '.join(SUFFIXES)} file there; name a folder or file of JSON lines")
    if (folder := store.folder) is not None:
        files = [InputFile(key=f.key, size=f.size, identity=SHA256 + sha256_of(folder / f.key)) for f in files]
    return Source(store, tuple(files), {})


def cut_parts(files: Sequence[InputFile], part_bytes: int) -> list[tuple[Piece, ...]]:
    """The pieces of each part, in order: small files together, a large plain file in several, about `part_bytes`."""
    parts: list[list[Piece]] = [[]]
    for piece in (piece for file in files for piece in _pieces(file, part_bytes)):
        filled = sum(p.stop - p.start for p in parts[-1])
        if parts[-1] and filled + piece.stop - piece.start > part_bytes:
            parts.append([])
        parts[-1].append(piece)
    return [tuple(part) for part in parts if part]


def _pieces(file: InputFile, part_bytes: int) -> Iterator[Piece]:
    step = part_bytes if file.key.endswith(PLAIN) else max(file.size, 1)
    for start in range(0, file.size, step):
        yield Piece(file=file, start=start, stop=min(start + step, file.size))
