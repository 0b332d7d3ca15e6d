"""Findings about a part of the input, kept in the local cache by its content: a rerun need not read it again."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from draftmill.contracts.cards import content_hash
from draftmill.contracts.errors import StorageError
from draftmill.storage.cache import cache_folder
from draftmill.storage.local import write_atomically
from draftmill.storage.store import sha256_of

T = TypeVar("T")

# What other code has found is not what this code finds.
_CODE = [sha256_of(Path(__file__).with_name(name)) for name in ("gate.py", "samples.py")]


def remembered(key: Sequence[str | int], kind: type[T], find: Callable[[], T]) -> T:
    """What `find` gives, found once on this host for each key; a cache that cannot be written costs time only."""
    path = cache_folder() / "findings" / content_hash([_CODE, key])
    with suppress(FileNotFoundError, msgspec.DecodeError):
        return msgspec.msgpack.decode(path.read_bytes(), type=kind)
    found = find()
    with suppress(StorageError):
        write_atomically(path, msgspec.msgpack.encode(found))
    return found
