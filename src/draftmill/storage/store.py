"""One folder of a local disk or an object store: list, get, put.

Object stores are spoken to by obstore. A URL is a local path, `s3://`, `gs://` or `az://`. S3 endpoint, region and
credentials come from the usual AWS environment variables, never from a recipe. A put is atomic: a reader sees the old
bytes, the new, or none. Failing requests are asked again for a short while here; `storage/transfer.py` waits longer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError
from obstore.store import LocalStore, S3Store, from_url

from draftmill.contracts.cards import InputFile
from draftmill.contracts.errors import RecipeError, StorageError
from draftmill.storage.failures import insisting, why
from draftmill.storage.local import (
    draft_of,
    expanded,
    list_folder,
    place,
    read_file,
    sizes_in,
    stat_file,
    write_atomically,
    write_new,
)

if TYPE_CHECKING:  # obstore keeps these for type checkers alone
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

OBJECT_SCHEMES = ("s3://", "gs://", "az://")
_ONE_SLASH = tuple(scheme.removesuffix("/") for scheme in OBJECT_SCHEMES)
"""A slip, never the name of a local folder."""
ETAG = "etag:"
_CHUNK_BYTES = 1 << 22
_READERS = 16
# A request may take as long as bytes flow; a connection on which nothing comes for a minute is given up. Nothing comes
# while an upload goes: 16 parts of 8 MiB that share a slow line (0.2 MB/s) take ten minutes.
_CLIENT: ClientConfig = {"allow_http": True, "timeout": "1 h", "read_timeout": "60 s", "connect_timeout": "10 s"}
_UPLOAD_CLIENT: ClientConfig = {**_CLIENT, "read_timeout": "10 min"}
_RETRIES: RetryConfig = {
    "max_retries": 10,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
}


@dataclass(frozen=True)
class Store:
    """A folder named by `url`; keys are relative to it, with `/` between their parts."""

    url: str
    backend: ObjectStore

    @property
    def folder(self) -> Path | None:
        """The local folder, or None on an object store."""
        return None if self.url.startswith(OBJECT_SCHEMES) else Path(self.url)

    @cached_property
    def uploads(self) -> ObjectStore:
        """The same place, for requests that send much before anything comes back."""
        return self.backend if self.folder is not None else _object_store(self.url, _UPLOAD_CLIENT)

    def files(self) -> list[InputFile]:
        """Every object below the URL, sorted by key; `identity` changes with the object."""
        return _listed(self) if self.folder is None else list_folder(self.folder)

    def sizes(self) -> dict[str, int]:
        """Bytes of every object below the URL, by key; what stands in a local folder and is no file is passed over."""
        if self.folder is not None:
            return sizes_in(self.folder)
        return {file.key: file.size for file in self.files()}

    def stat(self, key: str) -> InputFile | None:
        """The object as a listing shows it, or None where there is no such object."""
        if self.folder is not None:
            return stat_file(self.folder, key)
        try:
            return insisting(f"{self.url}/{key} cannot be read", lambda: described(obstore.head(self.backend, key)))
        except FileNotFoundError:
            return None

    def size(self, key: str) -> int | None:
        """Bytes of the object, or None where there is no such object."""
        found = self.stat(key)
        return None if found is None else found.size

    def get(self, key: str) -> bytes:
        """The object's bytes; StorageError naming the place where it is missing or the store fails."""
        data = self.find(key)
        if data is None:
            raise StorageError(f"{self.url}/{key} cannot be read: it is not there")
        return data

    def find(self, key: str) -> bytes | None:
        """The object's bytes, or None where there is no such object."""
        if self.folder is not None:
            return read_file(self.folder / key)
        try:
            return insisting(f"{self.url}/{key} cannot be read", lambda: bytes(obstore.get(self.backend, key).bytes()))
        except FileNotFoundError:
            return None

    def find_all(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The bytes of each of these objects that is there, several asked for at a time."""
        wanted = list(keys)
        with ThreadPoolExecutor(_READERS) as readers:
            found = zip(wanted, readers.map(self.find, wanted), strict=True)
            return {key: data for key, data in found if data is not None}

    def span(self, key: str, start: int, stop: int) -> bytes:
        """Bytes `start..stop` (half-open) of the object, fewer where it ends before."""
        what = f"{self.url}/{key} cannot be read"
        try:
            if self.folder is None:
                return insisting(what, lambda: bytes(obstore.get_range(self.backend, key, start=start, end=stop)))
            found = read_file(self.folder / key, start, stop)
        except FileNotFoundError:
            found = None
        if found is None:
            raise StorageError(f"{what}: it is not there")
        return found

    def fetch(self, key: str, path: Path) -> None:
        """Streams the object into the local file `path`, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = draft_of(path)
        what = f"{self.url}/{key} cannot be fetched"
        try:
            insisting(what, lambda: self._stream(key, draft))
            draft.replace(path)
        except FileNotFoundError as error:
            raise StorageError(f"{what}: it is not there") from error
        finally:
            draft.unlink(missing_ok=True)

    def _stream(self, key: str, draft: Path) -> None:
        found = obstore.get(self.backend, key)
        with draft.open("wb") as stream:
            for chunk in found.stream(min_chunk_size=_CHUNK_BYTES):
                stream.write(chunk)
        if draft.stat().st_size != found.meta["size"]:
            raise ConnectionError(f"{draft.stat().st_size:,} of {found.meta['size']:,} bytes arrived")

    def put(self, key: str, data: bytes | Path) -> None:
        """Writes the object, whole or not at all; a Path is streamed from disk."""
        if self.folder is not None:
            _put_local(self.folder / key, data)
            return
        what = f"{self.url}/{key} cannot be written"
        try:
            insisting(what, lambda: obstore.put(self.uploads, key, data))
        except FileNotFoundError as error:
            raise StorageError(f"{what}: {_bucket(self.url)}") from error

    def put_new(self, key: str, data: bytes) -> bytes:
        """Writes the object unless it is there already; what is there then. Of several writers just one wins."""
        if self.folder is not None:
            return data if write_new(self.folder / key, data) else self.get(key)
        what = f"{self.url}/{key} cannot be written"
        try:
            insisting(what, lambda: obstore.put(self.backend, key, data, mode="create"))
        except AlreadyExistsError:  # perhaps our own, whose answer was lost
            return self.get(key)
        except NotSupportedError:  # a store without conditional writes
            self.put(key, data)
        except FileNotFoundError as error:
            raise StorageError(f"{what}: {_bucket(self.url)}") from error
        return data

    def delete(self, keys: list[str]) -> None:
        """Removes objects, in order; one that is not there is passed over."""
        for key in keys:
            with suppress(FileNotFoundError):
                insisting(f"{self.url}/{key} cannot be removed", partial(obstore.delete, self.backend, key))


def _bucket(url: str) -> str:
    return f"there is no bucket {url.split('/')[2]}"


def _put_local(path: Path, data: bytes | Path) -> None:
    if isinstance(data, Path):
        place(data, path)
    else:
        write_atomically(path, data)


def _listed(store: Store) -> list[InputFile]:
    """Every object, page after page. A listing that repeats itself, or ends before the last object, is an error."""
    what = f"{store.url} cannot be listed"
    try:
        found = insisting(what, lambda: _pages(store))
        if found:
            last = max(found)
            rest = insisting(what, lambda: next(iter(obstore.list(store.backend, offset=last, chunk_size=1)), []))
            _refuse_rest(store, len(found), [meta["path"] for meta in rest if meta["path"] not in found])
    except FileNotFoundError as error:
        raise StorageError(f"{what}: {_bucket(store.url)}") from error
    except ValueError as error:  # a key that is no path, with // for example
        raise StorageError(f"{what}: {error}") from error
    return sorted(found.values(), key=lambda file: file.key)


def _pages(store: Store) -> dict[str, InputFile]:
    found: dict[str, InputFile] = {}
    for meta in (meta for page in obstore.list(store.backend, chunk_size=1000) for meta in page):
        if meta["path"] in found:
            raise StorageError(f"{store.url}: the store's listing repeats {meta['path']}: it goes round in circles")
        found[meta["path"]] = described(meta)
    return found


def _refuse_rest(store: Store, count: int, rest: list[str]) -> None:
    """A page that says more is to come, but not where, ends the listing too early without an error of its own."""
    if rest:
        raise StorageError(
            f"{store.url}: the store's listing ended after {count:,} objects, but {rest[0]} comes after them; "
            "its pages cannot be trusted (look for a newer version of the store)"
        )


def described(meta: obstore.ObjectMeta) -> InputFile:
    """An object as plans name it."""
    return InputFile(key=meta["path"], size=meta["size"], identity=f"{ETAG}{meta['e_tag']}")


def open_store(url: str, *, create: bool = False) -> Store:
    """The store a URL names; RecipeError for an unknown scheme, or a local folder that is none.

    With `create` a local folder that does not exist is made.
    """
    if (store := find_store(url, create=create)) is None:
        raise RecipeError(f"{url}: no such folder (looked at {expanded(url).absolute()})")
    return store


def find_store(url: str, *, create: bool = False) -> Store | None:
    """As `open_store`; None for a local folder that does not exist."""
    if url.startswith(OBJECT_SCHEMES):
        return Store(url.rstrip("/"), _object_store(url, _CLIENT))
    if "://" in url or url.startswith(_ONE_SLASH):
        raise RecipeError(f"{url}: a URL is a local path, s3://, gs:// or az://")
    folder = expanded(url).absolute()
    try:
        if folder.exists() and not folder.is_dir():
            raise RecipeError(f"{url} is a file; a folder is wanted here")
        if not folder.exists() and not create:
            return None
        return Store(str(folder), LocalStore(folder, mkdir=True, automatic_cleanup=True))
    except (BaseError, OSError) as error:
        raise StorageError(f"{folder} cannot be made or opened: {why(error)}") from error


def split_url(url: str) -> tuple[str, str]:
    """The URL of a file as its folder's and its name there."""
    folder, _, name = url.rpartition("/")
    return folder or ("/" if url.startswith("/") else "."), name


def _object_store(url: str, client: ClientConfig) -> ObjectStore:
    try:
        if url.startswith("s3://"):
            return S3Store.from_url(url, config=_s3_options(), client_options=client, retry_config=_RETRIES)
        return from_url(url, client_options=client, retry_config=_RETRIES)
    except (BaseError, OSError, ValueError) as error:
        raise RecipeError(f"{url} names no bucket that can be opened: {why(error)}") from error


def _s3_options() -> S3Config:
    """Endpoint and region as the AWS tools read them; credentials obstore reads from the environment itself."""
    options: S3Config = {}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        options["endpoint"] = endpoint
    options["region"] = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return options


def sha256_of(data: bytes | Path) -> str:
    """sha256 of bytes or of a file's content, 64 hex digits."""
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest()
    with data.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
