"""A set's parts as local files: where they lie on a local disk, or copies of which only so many bytes are kept.

Copies are fetched ahead, checked against their sha256, and removed when others need the room, the one used longest ago
first. Processes of a host share them, and each counts those that it has asked for: a file that another one has opened
stays readable to it, and one that it was about to open is fetched again.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from draftmill.contracts.cards import InputFile
from draftmill.contracts.errors import DraftmillError, StorageError
from draftmill.storage.cache import cache_folder
from draftmill.storage.fetch import SHA256, RemovedError, local_copy
from draftmill.storage.growing import GrowingSet
from draftmill.storage.waiting import Errand

T = TypeVar("T")

# Another process removes a copy once, and again only when it has used it itself meanwhile.
_MOST_FETCHES = 5


class Shards:
    """The files of `parts`; of copies this process keeps at most `limit_bytes`, or one part."""

    def __init__(self, parts: GrowingSet, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._parts = parts
        self._folder = cache_folder() / "parts" / parts.plan.hash
        # What earlier runs have left counts too, oldest first.
        self._held = {name: size for _, name, size in sorted(_files(self._folder))}
        self._ahead: Errand[None] | None = None

    def holds(self, file: InputFile) -> bool:
        """Whether this process keeps the file, as far as it knows."""
        return self._parts.is_local or _name(file) in self._held

    def read(self, file: InputFile, how: Callable[[Path], T]) -> T:
        """What `how`, which opens it, makes of the file: checked, and fetched where it is not there."""
        self.settle()
        if self._parts.is_local:
            return how(local_copy(self._parts.store, file))
        for _ in range(_MOST_FETCHES):
            with suppress(RemovedError, FileNotFoundError):
                return how(Errand(lambda: self._fetch(file)).result(self._parts.waiting.heed))
        raise StorageError(
            f"{self._parts.store.url}/{file.key} was fetched {_MOST_FETCHES} times, and other processes of this host "
            f"removed it each time before it was opened: give copies more room than {self.limit_bytes:,} bytes"
        )

    def fetch_ahead(self, index: int) -> None:
        """Fetches a part behind the reader's back, if it is there and fits beside what was used last."""
        if not self._parts.is_local and self._ahead is None and index < self._parts.num_parts:
            self._ahead = Errand(lambda: self._try(index))

    def settle(self) -> None:
        """Waits for the part that is being fetched ahead."""
        if self._ahead is not None:
            self._ahead.result(self._parts.waiting.heed)
            self._ahead = None

    def _try(self, index: int) -> None:
        """What fails here fails again, and is told, when the part is needed."""
        try:
            part = self._parts.find(index)
            if part is not None and part.file.size + next(reversed(self._held.values()), 0) <= self.limit_bytes:
                self._fetch(part.file)
        except DraftmillError:
            return

    def _fetch(self, file: InputFile) -> Path:
        self._make_room(file)
        job = partial(local_copy, self._parts.store, file, self._folder)
        try:
            path = self._parts.patiently(job, self._parts.store.url)
        except RemovedError:  # by another process, which may have fetched it anew by now
            raise
        except StorageError:
            (self._folder / _name(file)).unlink(missing_ok=True)  # what is not as it should be is fetched again
            raise
        self._held.pop(_name(file), None)
        self._held[_name(file)] = file.size
        return path

    def _make_room(self, file: InputFile) -> None:
        others = [name for name in self._held if name != _name(file)]
        while others and file.size + sum(self._held[name] for name in others) > self.limit_bytes:
            oldest = others.pop(0)
            (self._folder / oldest).unlink(missing_ok=True)
            del self._held[oldest]


def _files(folder: Path) -> Iterator[tuple[float, str, int]]:
    """When each file was written, its name and its bytes; other ranks of this host may be removing some."""
    for path in folder.glob("*"):
        with suppress(FileNotFoundError):
            found = path.stat()
            yield found.st_mtime, path.name, found.st_size


def _name(file: InputFile) -> str:
    return file.identity.removeprefix(SHA256)
