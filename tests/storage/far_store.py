"""A store that may be out of reach for minutes, on a clock that stands still unless somebody sleeps; no network."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from draftmill.contracts.cards import InputFile
from draftmill.contracts.errors import StorageError
from draftmill.storage.patience import Patiently
from draftmill.storage.store import Store, open_store

NO_WAY = "Generic S3 error: error sending request for url"


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def patiently(self, limit_s: float) -> Patiently:
        """Patience on this clock."""
        return Patiently(limit_s, self, self.sleep)


@dataclass
class Line:
    """The line to a store: what was asked over it, and until when it is cut."""

    clock: Clock = field(default_factory=Clock)
    cut_until: float = 0.0
    asked: Counter[str] = field(default_factory=Counter)
    """How often each key was asked for, in vain too; a listing is the key ""."""
    cuts: dict[str, float] = field(default_factory=dict)
    """Where a key that begins so is asked for, the line is cut for so many seconds, once."""

    def cut(self, seconds: float) -> None:
        """From now on, for so long."""
        self.cut_until = self.clock() + seconds

    def carry(self, key: str) -> None:
        """Takes a request; what `insisting` raises in the end where nobody answers."""
        self.asked[key] += 1
        for start in [start for start in self.cuts if key.startswith(start)]:
            self.cut(self.cuts.pop(start))
        if self.clock() < self.cut_until:
            raise StorageError(f"{key} cannot be reached: {NO_WAY}") from GenericError(NO_WAY)


@dataclass(frozen=True)
class FarStore(Store):
    """An object store at the end of a line."""

    url: str = "s3://far/away"
    backend: MemoryStore = field(default_factory=MemoryStore)
    line: Line = field(default_factory=Line)

    @property
    def uploads(self) -> MemoryStore:  # type: ignore[override]
        return self.backend

    def files(self) -> list[InputFile]:
        self.line.carry("")
        return super().files()

    def stat(self, key: str) -> InputFile | None:
        self.line.carry(key)
        return super().stat(key)

    def find(self, key: str) -> bytes | None:
        self.line.carry(key)
        return super().find(key)

    def fetch(self, key: str, path: Path) -> None:
        self.line.carry(key)
        super().fetch(key, path)

    def put(self, key: str, data: bytes | Path) -> None:
        self.line.carry(key)
        super().put(key, data)

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self.line.carry(key)
        super().delete(keys)


def sent_away(folder: Path | str) -> FarStore:
    """A far store with a copy of what lies in a local folder."""
    far, near = FarStore(), open_store(str(folder))
    for file in near.files():
        far.put(file.key, near.get(file.key))
    far.line.asked.clear()
    return far
