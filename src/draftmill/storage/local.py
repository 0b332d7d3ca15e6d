"""A local folder as a store: any file name, whole files or none, and no drafts left behind by runs that were killed."""

import errno
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

import psutil

from draftmill.contracts.cards import InputFile
from draftmill.contracts.errors import RecipeError, StorageError

STAT = "stat:"
LOCK_FILE = ".draftmill-lock"
"""Who writes to the folder now (`lock.py`); no part of what it holds."""
_DRAFT = ".tmp-"
_IS_DRAFT = re.compile(r"\.tmp-[^/]+-[0-9]+$")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP)
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def expanded(name: str) -> Path:
    """The local path that somebody has named, with `~` for a home folder; RecipeError where nobody has that one."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise RecipeError(
            f"{name}: this host knows no home folder for it; write the path in full, or ./{name} for a folder of that "
            "name"
        ) from error


def list_folder(folder: Path) -> list[InputFile]:
    """Every file below `folder`, sorted by key; `identity` changes when a file is written to or replaced.

    Linked folders are followed, each once. StorageError for what cannot be listed, and for what is no file (a pipe).
    """
    found = []
    for path in _entries(folder):
        key = _sayable(path.relative_to(folder).as_posix(), folder)
        if not stat.S_ISREG(_stat(path).st_mode):
            raise StorageError(f"{path} is neither a file nor a folder; remove it, or name another folder")
        found.append(InputFile(key=key, size=_stat(path).st_size, identity=version_of(path)))
    return sorted(found, key=lambda file: file.key)


def sizes_in(folder: Path) -> dict[str, int]:
    """Bytes of every file below `folder`, by key. What is no file (a link to nothing, a pipe) is not there: nobody who
    writes a set or a run has made it, and nothing of theirs is lost with it.
    """
    found = {}
    for path in _entries(folder):
        try:
            status = path.stat()
        except OSError as error:
            if error.errno not in _NOTHING_THERE:
                raise StorageError(f"{path} cannot be read: {reason(error)}") from error
            continue
        if stat.S_ISREG(status.st_mode):
            found[path.relative_to(folder).as_posix()] = status.st_size
    return found


def _entries(folder: Path) -> Iterator[Path]:
    """Everything below `folder` but folders, drafts and its lock."""
    for place, names in _places(folder):
        yield from (Path(place, name) for name in names if not is_draft(name) and name != LOCK_FILE)


def _places(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Every folder from `folder` down, and what else is in it."""
    seen = set[str]()
    for place, folders, names in os.walk(folder, onerror=_cannot_list, followlinks=True):
        folders.sort()
        if (real := os.path.realpath(place)) in seen:  # a link back, or to what is listed already
            folders.clear()
            continue
        seen.add(real)
        yield place, names


def _cannot_list(error: OSError) -> None:
    raise StorageError(f"{error.filename} cannot be listed: {reason(error)}") from error


def _sayable(key: str, folder: Path) -> str:
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise StorageError(f"{folder}/{key!r}: a file name that is not UTF-8 cannot be recorded; rename it") from error
    return key


def version_of(path: Path) -> str:
    """What tells one state of a file from another without reading it: time of change, bytes, and which file it is."""
    found = _stat(path)
    return f"{STAT}{found.st_mtime_ns:x}-{found.st_size:x}-{found.st_ino:x}"


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {reason(error)}") from error


def stat_file(folder: Path, key: str) -> InputFile | None:
    """The file as a listing shows it, or None where there is no such file."""
    path = folder / key
    return InputFile(key=key, size=_stat(path).st_size, identity=version_of(path)) if path.is_file() else None


def read_file(path: Path, start: int = 0, stop: int | None = None) -> bytes | None:
    """Bytes `start..stop` (half-open; by default all) of the file, or None where there is no such file.

    A folder or a pipe of that name is none: a pipe would be waited for.
    """
    try:
        if not path.is_file():
            return None
        with path.open("rb") as stream:
            stream.seek(start)
            return stream.read(-1 if stop is None else stop - start)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {reason(error)}") from error


def draft_of(path: Path) -> Path:
    """Where this process writes what is going to be `path`."""
    return path.with_name(f"{path.name}{_DRAFT}{platform.node()}-{os.getpid()}")


def is_draft(name: str) -> bool:
    """Whether a file is one that was being written when its run ended, or still is."""
    return _IS_DRAFT.search(name) is not None


def sweep_drafts(folder: Path) -> None:
    """Removes what processes of this host that are gone have left half-written in `folder`."""
    for draft in _abandoned(folder, "*"):
        if draft.is_dir() and not draft.is_symlink():  # of an export
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)


def _abandoned(folder: Path, name: str) -> Iterator[Path]:
    """Drafts of what is called like the pattern `name`, by processes of this host that are gone."""
    for draft in folder.glob(f"{name}{_DRAFT}{platform.node()}-*"):
        pid = draft.name.rpartition("-")[2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            yield draft


@contextmanager
def draft_folder(target: Path) -> Iterator[Path]:
    """The name of a folder beside `target`, this process's own, to be made and renamed; what is left of it goes, and so
    does what killed processes of this host have left.
    """
    for old in _abandoned(target.parent, escape(target.name)):
        shutil.rmtree(old, ignore_errors=True)
    draft = draft_of(target)
    shutil.rmtree(draft, ignore_errors=True)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def place(source: Path, target: Path) -> None:
    """Gives `target` the bytes of `source`, whole or not at all: a link where both lie on one disk, else a copy."""
    with _drafted(target) as draft:
        try:
            os.link(source, draft)
        except OSError:  # another disk, or one that knows no links
            shutil.copyfile(source, draft)
        sync(draft)
        draft.replace(target)


def write_atomically(target: Path, data: bytes) -> None:
    """Writes `target` whole or not at all."""
    with _drafted(target) as draft:
        draft.write_bytes(data)
        sync(draft)
        draft.replace(target)


def write_new(target: Path, data: bytes) -> bool:
    """Writes `target` whole unless it exists; whether it was written. Of several writers just one wins."""
    with _drafted(target) as draft:
        draft.write_bytes(data)
        sync(draft)
        return _take_name(draft, target)


@contextmanager
def _drafted(target: Path) -> Iterator[Path]:
    """A file beside `target` to be written and renamed; StorageError where the disk does not take it."""
    draft = draft_of(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        yield draft
    except OSError as error:
        raise no_room(error, target) from error
    finally:
        with suppress(OSError):
            draft.unlink()


def _take_name(draft: Path, target: Path) -> bool:
    try:
        os.link(draft, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if target.exists():
            return False
        draft.replace(target)  # a disk without links: the last of two simultaneous writers wins
    return True


def sync(path: Path) -> None:
    """Waits until the file's bytes are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_room(error: OSError, path: Path) -> StorageError:
    """What a failed write means for people, with the cure where the disk is full."""
    cure = "; free some space and run the same command again" if error.errno in _NO_ROOM else ""
    return StorageError(f"{path} cannot be written: {reason(error)}{cure}")


def reason(error: OSError) -> str:
    """What the operating system says, without the path."""
    return error.strerror or str(error) or type(error).__name__
