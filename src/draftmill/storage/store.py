"""One folder of a local disk or an object store: list, get, put.

Built on obstore. A URL is a local path, `s3://`, `gs://` or `az://`. S3 endpoint, region and credentials come from the
usual AWS environment variables, never from a recipe. A put is atomic: a reader sees the old bytes, the new, or none.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, S3Store, from_url

from draftmill.contracts.cards import InputFile
from draftmill.contracts.errors import RecipeError, StorageError

if TYPE_CHECKING:  # obstore keeps these for type checkers alone
    from obstore.store import ObjectStore, S3Config

OBJECT_SCHEMES = ("s3://", "gs://", "az://")
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Store:
    """A folder named by `url`; keys are relative to it, with `/` between their parts."""

    url: str
    backend: ObjectStore

    @property
    def folder(self) -> Path | None:
        """The local folder, or None on an object store."""
        return None if self.url.startswith(OBJECT_SCHEMES) else Path(self.url)

    def files(self) -> list[InputFile]:
        """Every object below the URL, sorted by key; `identity` is the store's etag."""
        found = [meta for page in obstore.list(self.backend) for meta in page]
        return sorted(
            (InputFile(key=m["path"], size=m["size"], identity=f"etag:{m['e_tag']}") for m in found),
            key=lambda f: f.key,
        )

    def get(self, key: str) -> bytes:
        """The object's bytes; StorageError naming the place where it is missing or the store fails."""
        try:
            return bytes(obstore.get(self.backend, key).bytes())
        except (BaseError, OSError) as error:
            raise StorageError(f"{self.url}/{key} cannot be read: {_reason(error)}") from error

    def find(self, key: str) -> bytes | None:
        """The object's bytes, or None where there is no such object."""
        try:
            return bytes(obstore.get(self.backend, key).bytes())
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise StorageError(f"{self.url}/{key} cannot be read: {_reason(error)}") from error

    def size(self, key: str) -> int | None:
        """Bytes of the object, or None where there is no such object."""
        try:
            return obstore.head(self.backend, key)["size"]
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise StorageError(f"{self.url}/{key} cannot be read: {_reason(error)}") from error

    def fetch(self, key: str, path: Path) -> None:
        """Streams the object into the local file `path`, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        try:
            with draft.open("wb") as stream:
                for chunk in obstore.get(self.backend, key).stream(min_chunk_size=_CHUNK_BYTES):
                    stream.write(chunk)
        except (BaseError, OSError) as error:
            draft.unlink(missing_ok=True)
            raise StorageError(f"{self.url}/{key} cannot be fetched: {_reason(error)}") from error
        draft.replace(path)

    def put(self, key: str, data: bytes | Path) -> None:
        """Writes the object, whole or not at all; a Path is streamed from disk."""
        try:
            obstore.put(self.backend, key, data)
        except (BaseError, OSError) as error:
            raise StorageError(f"{self.url}/{key} cannot be written: {_reason(error)}") from error

    def delete(self, keys: list[str]) -> None:
        """Removes objects, in order; one that is not there is passed over."""
        for key in keys:
            try:
                obstore.delete(self.backend, key)
            except FileNotFoundError:
                continue
            except (BaseError, OSError) as error:
                raise StorageError(f"{self.url}/{key} cannot be removed: {_reason(error)}") from error


def open_store(url: str, *, create: bool = False) -> Store:
    """The store a URL names; RecipeError for an unknown scheme, or a local folder that is none.

    With `create` a local folder that does not exist is made.
    """
    if url.startswith(OBJECT_SCHEMES):
        return Store(url.rstrip("/"), _object_store(url))
    if "://" in url:
        raise RecipeError(f"{url}: a URL is a local path, s3://, gs:// or az://")
    folder = Path(url).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"{url} is a file; a folder is wanted here")
    if not folder.exists() and not create:
        raise RecipeError(f"{url}: no such folder (looked at {folder})")
    try:
        return Store(str(folder), LocalStore(folder, mkdir=True, automatic_cleanup=True))
    except (BaseError, OSError) as error:
        raise StorageError(f"{folder} cannot be made or opened: {_reason(error)}") from error


def _object_store(url: str) -> ObjectStore:
    try:
        if url.startswith("s3://"):
            return S3Store.from_url(url, config=_s3_options(), client_options={"allow_http": True})
        return from_url(url)
    except (BaseError, OSError, ValueError) as error:
        raise RecipeError(f"{url} names no bucket that can be opened: {_reason(error)}") from error


def is_there(url: str) -> bool:
    """Whether the URL can be listed without making anything: a local folder that exists, or any object store."""
    return url.startswith(OBJECT_SCHEMES) or Path(url).expanduser().is_dir()


def _s3_options() -> S3Config:
    """Endpoint and region as the AWS tools read them; credentials obstore reads from the environment itself."""
    options: S3Config = {}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        options["endpoint"] = endpoint
    options["region"] = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return options


def _reason(error: Exception) -> str:
    """The first line of a store's error, with the cure where it could not be reached or let nobody in."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, BaseError) and ("error sending request" in line.lower() or "403" in line):
        line += "; check AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    return line


def sha256_of(data: bytes | Path) -> str:
    """sha256 of bytes or of a file's content, 64 hex digits."""
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest()
    digest = hashlib.sha256()
    with data.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
