"""The local cache: what was fetched, converted or found out once and serves again, and the spool of work in hand."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from draftmill.contracts.errors import RecipeError, StorageError
from draftmill.storage.local import expanded, reason

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def cache_folder() -> Path:
    """`$DRAFTMILL_CACHE`, or `draftmill` below the user's cache folder; whether it is there or not.

    RecipeError where nobody says where that is, StorageError where it can be no folder.
    """
    chosen = os.environ.get("DRAFTMILL_CACHE")
    folder = expanded(chosen) if chosen else _users_folder() / "draftmill"
    with _to_be_mended(folder):
        nearest = next(place for place in (folder, *folder.parents) if place.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is a file")
    return folder


def _users_folder() -> Path:
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen)
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:
        raise RecipeError(
            "this user has no home folder to keep a cache in: name a local folder for it by DRAFTMILL_CACHE"
        ) from error


@contextmanager
def spool_folder(name: str) -> Iterator[Path]:
    """A local folder for files that are not published yet, removed at the end of a run that did not fail.

    What a run that failed or was killed has left is there for the next one of the same name; only after a restart of
    the host it is not, for then files may have lost bytes. A second run beside the first gets a folder of its own.
    """
    spools = cache_folder() / "spool"
    with _to_be_mended(spools):
        spools.mkdir(parents=True, exist_ok=True)
    for left in spools.glob(f"{name}-*"):
        if not psutil.pid_exists(int(left.name.rpartition("-")[2])):
            shutil.rmtree(left, ignore_errors=True)
    with _locked(spools / f"{name}.lock") as is_first:
        folder = spools / (name if is_first else f"{name}-{os.getpid()}")
        with _to_be_mended(folder):
            _make_or_empty(folder)
        try:
            yield folder
        except BaseException:
            if not is_first:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _to_be_mended(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be made ({reason(error)}): work in hand is kept there; mend it, or name another local "
            "folder by DRAFTMILL_CACHE"
        ) from error


def _make_or_empty(folder: Path) -> None:
    boot = folder / "boot"
    if folder.is_dir() and not (boot.is_file() and boot.read_text() == _BOOT_ID.read_text()):
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    boot.write_text(_BOOT_ID.read_text())


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds the lock file, which goes with its process; False where another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last holder may have removed it between our open and our lock: then it locks nobody else out.
        is_held = path.is_file() and path.stat().st_ino == os.fstat(descriptor).st_ino
    except OSError:
        is_held = False
    try:
        yield is_held
    finally:
        if is_held:
            path.unlink(missing_ok=True)
        os.close(descriptor)
