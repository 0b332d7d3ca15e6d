"""What tokenize reads: a set made by generate, or a bare folder or file listed once.

Of a set just the files that its card names are read (never what was set aside, never a stray file), and the card is
compared with what the store lists. Of a bare listing every file of JSON lines is.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from draftmill.contracts.cards import CARD_FILE, PLAN_FILE, InputFile
from draftmill.contracts.errors import InputError, StorageError
from draftmill.contracts.rows import JSONL_SUFFIXES
from draftmill.settings.workers import usable_cores
from draftmill.storage.fetch import SHA256
from draftmill.storage.sets import open_set
from draftmill.storage.store import Store, open_store, sha256_of, split_url
from draftmill.tokenize.pieces import Piece, pieces_of


@dataclass(frozen=True)
class Source:
    """The files to read, in order, and what their producer's card says (empty for a bare listing)."""

    store: Store
    files: tuple[InputFile, ...]
    """As the plan names them: by content where it is known, else by the store's etag."""
    listed: dict[str, InputFile]
    """As the store lists them, by key: the version that has to be read."""
    card: dict[str, Any]

    @property
    def is_checked(self) -> bool:
        """Whether the content of each file is known from a card, and has to be compared with it."""
        return bool(self.card)

    def pieces(self, part_bytes: int) -> list[Piece]:
        """The files in order, large plain ones in pieces of about a part."""
        return [piece for file in self.files for piece in self._pieces(file, part_bytes)]

    def _pieces(self, file: InputFile, part_bytes: int) -> Sequence[Piece]:
        if self.is_checked and self.store.folder is None:  # a hash is of the whole object
            return (Piece(file=file, start=0, stop=file.size),) if file.size else ()
        return tuple(pieces_of(file, part_bytes, partial(self.store.span, file.key)))


def open_source(url: str) -> Source:
    """The input's files; InputError where there are none, StorageError where a set is unfinished or incomplete."""
    if url.endswith(JSONL_SUFFIXES):
        folder, name = split_url(url)
        store = open_store(folder)
        listed = store.stat(name)
        return _bare(store, [listed] if listed else [], url)
    store = open_store(url)
    if store.find(PLAN_FILE) is not None:
        return _made(url)
    if store.find(CARD_FILE) is not None:
        raise StorageError(f"{url} holds a {CARD_FILE} but no {PLAN_FILE}: part of a set is missing")
    return _bare(store, [file for file in store.files() if file.key.endswith(JSONL_SUFFIXES)], url)


def _made(url: str) -> Source:
    """A set made by generate: what its card names, each file there and of the size it names."""
    made = open_set(url, "generate")
    listed = {file.key: file for file in made.store.files()}
    wrong = [file for file in made.inputs if file.key not in listed or listed[file.key].size != file.size]
    if wrong:
        sizes = [(file.key, listed[file.key].size if file.key in listed else 0, file.size) for file in wrong[:3]]
        raise StorageError(
            f"{url} is not what its card says: {len(wrong):,} of {len(made.inputs):,} files are missing or cut: "
            + ", ".join(f"{key} ({there:,} of {size:,} bytes)" for key, there, size in sizes)
            + "; run its draftmill generate again"
        )
    return Source(made.store, made.inputs, listed, {"plan": made.plan.hash, **made.card.content})


def _bare(store: Store, listed: Sequence[InputFile], url: str) -> Source:
    """Files without a card. Local ones are identified by content, so that a copied folder is the same input."""
    if not listed:
        raise InputError(f"{url}: no {', '.join(JSONL_SUFFIXES)} file there; name a folder or file of JSON lines")
    with ThreadPoolExecutor(usable_cores()) as readers:
        files = tuple(listed) if store.folder is None else tuple(readers.map(partial(_hashed, store), listed))
    return Source(store, files, {file.key: file for file in listed}, {})


def _hashed(store: Store, file: InputFile) -> InputFile:
    assert store.folder is not None
    identity = SHA256 + sha256_of(store.folder / file.key)
    if store.stat(file.key) != file:
        raise StorageError(f"{store.url}/{file.key} is being written to; wait until it is whole")
    return InputFile(key=file.key, size=file.size, identity=identity)
