"""Answers whose part is not whole yet: a local file for each open part, one line for each prompt that is done.

    {"id": …, "reason": …, "crc32": …, "figures": …} TAB the row as it will be published LF

A line is written at once and whole, so that whatever ends the run costs the line it was writing, no other: a file that
ends in half a line is cut back to its last line end when it is opened, and that prompt is asked again. A line that was
harmed otherwise is told by its checksum, and counts as not there. The first line of an id is the one that counts.
"""

import fcntl
import hashlib
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from draftmill.contracts.cards import Dropped
from draftmill.contracts.errors import StorageError
from draftmill.generate.conversation import Kept
from draftmill.generate.figures import AnswerFigures
from draftmill.storage.cache import cache_folder
from draftmill.storage.local import expanded
from draftmill.storage.store import Store

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 16
_KEY_CHARS = 32


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a prompt that is done, without its row: `dropped` where there is none."""

    id: str
    crc32: int = 0
    """Of all else in the line: of the entry without it, and of the row."""
    figures: AnswerFigures = AnswerFigures()
    reason: str | None = None
    """Why the row is set aside; None for a row of the set."""
    dropped: Dropped | None = None

    @property
    def kind(self) -> Literal["row", "aside", "dropped"]:
        """What became of the prompt."""
        return "dropped" if self.dropped else "aside" if self.reason else "row"


@dataclass(frozen=True)
class Place:
    """Where a line's row lies in its file, in bytes."""

    entry: Entry
    start: int
    size: int


@dataclass(frozen=True)
class SpoolFile:
    """The answers of one part."""

    path: Path

    def mend(self) -> None:
        """Cuts half a line off the end, and says so."""
        if not self.path.exists():
            return
        with self.path.open("r+b") as stream:
            size = stream.seek(0, os.SEEK_END)
            end = _end_of_last_line(stream, size)
            if end < size:
                stream.truncate(end)
                logger.warning(
                    "%s: cut %d bytes of an unfinished line; its prompt is asked again", self.path, size - end
                )

    def places(self) -> dict[str, Place]:
        """Every prompt that is done, by id."""
        found: dict[str, Place] = {}
        if not self.path.exists():
            return found
        with self.path.open("rb") as stream:
            start = 0
            for line in stream:
                if (entry := _read(line)) is None:
                    logger.warning("%s: a harmed line at byte %d; its prompt is asked again", self.path, start)
                elif entry.id not in found:
                    header = line.index(b"\t") + 1
                    found[entry.id] = Place(entry, start + header, len(line) - header)
                start += len(line)
        return found

    def append(self, end: Kept | Dropped) -> None:
        """Adds one line, whole or not at all; StorageError where the disk is full or refuses it."""
        left = memoryview(_line(end))
        with _told(self.path), self.path.open("ab", buffering=0) as stream:
            before = stream.tell()
            try:
                while left:
                    left = left[stream.write(left) :]
            except OSError:
                # A full disk takes the beginning before it refuses the rest. Where this fails too, opening mends it.
                with suppress(OSError):
                    stream.truncate(before)
                raise

    def row(self, place: Place) -> bytes:
        """The row at a place, line end included."""
        with self.path.open("rb") as stream:
            stream.seek(place.start)
            return stream.read(place.size)

    def remove(self) -> None:
        """Forgets the part: it is published."""
        self.path.unlink(missing_ok=True)


def _end_of_last_line(stream: BinaryIO, size: int) -> int:
    """Bytes up to the last line end, it included."""
    end = size
    while end > 0:
        start = max(0, end - _CHUNK_BYTES)
        stream.seek(start)
        found = stream.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _read(line: bytes) -> Entry | None:
    """The entry of a line; None where the line was harmed."""
    header, _, row = line.partition(b"\t")
    try:
        entry = msgspec.json.decode(header, type=Entry)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return entry if line.endswith(b"\n") and _crc32(entry, row) == entry.crc32 else None


def _line(end: Kept | Dropped) -> bytes:
    if isinstance(end, Dropped):
        assert end.id is not None, "a prompt has an id"
        entry, row = Entry(id=end.id, dropped=end), b"\n"
    else:
        entry, row = Entry(id=end.id, figures=end.figures, reason=end.reason), end.data
    return msgspec.json.encode(msgspec.structs.replace(entry, crc32=_crc32(entry, row))) + b"\t" + row


def _crc32(entry: Entry, row: bytes) -> int:
    return zlib.crc32(row, zlib.crc32(msgspec.json.encode(msgspec.structs.replace(entry, crc32=0))))


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Says of a failure what to do about it."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written ({error.strerror}): make room there, or name another --spool; what is done is "
            "saved, run the same command again to go on"
        ) from error


@dataclass(frozen=True)
class Spool:
    """The local folder of one set on its way."""

    folder: Path

    def file(self, part: str) -> SpoolFile:
        """The file of one part."""
        return SpoolFile(self.folder / f"{part}.jsonl")

    def draft(self, name: str) -> Path:
        """Where a data file is made before it is published."""
        return self.folder / f"draft-{name}"


@contextmanager
def open_spool(root: str | None, plan: str, stores: Sequence[Store]) -> Iterator[Spool]:
    """The spool of a set, this run's alone while the block lasts; StorageError where another run is at work on it."""
    places = "\n".join(sorted(store.url for store in stores))
    key = hashlib.sha256(f"{plan}\n{places}".encode()).hexdigest()[:_KEY_CHARS]
    folder = (expanded(root) if root else cache_folder() / "generate") / key
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with alone_in([folder]):
        yield Spool(folder)


@contextmanager
def alone_in(folders: Sequence[Path]) -> Iterator[None]:
    """Keeps other runs of this host out of some folders; the lock ends with this process, however it ends."""
    with ExitStack() as stack:
        for folder in folders:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StorageError(
                    f"another run of draftmill generate is at work in {folder}: wait until it has ended, or end it; "
                    "this command, run again, does what is left"
                ) from error
            except OSError as error:
                logger.warning("%s cannot be locked (%s): see that no other run writes there", folder, error.strerror)
        yield
