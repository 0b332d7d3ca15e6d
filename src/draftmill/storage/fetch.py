"""Objects as local files: read where they lie on a local disk, fetched once into the cache from an object store."""

import hashlib
from pathlib import Path

from draftmill.contracts.cards import InputFile
from draftmill.contracts.errors import StorageError
from draftmill.storage.cache import cache_folder
from draftmill.storage.store import Store, sha256_of

SHA256 = "sha256:"


class RemovedError(StorageError):
    """A file that is gone, though it was listed or has just been fetched."""


def local_copy(store: Store, file: InputFile, folder: Path | None = None) -> Path:
    """A local path with the bytes that `file` names; StorageError where they are cut or different, and a
    RemovedError where they are missing.

    An identity `sha256:…` is checked by content, a store's etag by size. Objects go to `folder`, or to the cache.
    """
    place = store.folder / file.key if store.folder else None
    path = place or (folder or cache_folder() / "objects") / _object_name(store, file)
    if not path.is_file() and store.folder is None:
        store.fetch(file.key, path)
    try:
        size = path.stat().st_size
        is_whole = size == file.size and _has_content_of(path, file)
    except FileNotFoundError as error:
        raise RemovedError(f"{path} is missing, but it was listed: make it or fetch it again") from error
    if not is_whole:
        witness = "its card says" if file.identity.startswith(SHA256) else "was listed"
        raise StorageError(
            f"{store.url}/{file.key} is not what {witness} ({size:,} of {file.size:,} bytes, or other "
            "content): it was cut or changed; fetch it again, or remove it and run what made it again (local copy: "
            f"{path})"
        )
    return path


def _has_content_of(path: Path, file: InputFile) -> bool:
    """Whether it has the sha256 that `file` is identified by; True where that is something else."""
    return not file.identity.startswith(SHA256) or sha256_of(path) == file.identity.removeprefix(SHA256)


def _object_name(store: Store, file: InputFile) -> str:
    """Content names the cached copy where it is known; elsewhere place and etag do."""
    if file.identity.startswith(SHA256):
        return file.identity.removeprefix(SHA256)
    return hashlib.sha256(f"{store.url}/{file.key}\n{file.identity}".encode()).hexdigest()
