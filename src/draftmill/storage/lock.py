"""One writer at a time in a local folder: a lock of the operating system, which ends with its holder however it ends.

In: the URLs of a set's outputs. The lock's file says who holds it, is no part of what the folder holds (`list_folder`
passes over it) and goes with its holder; one that a kill has left locks nobody out. Object stores have no such lock.
"""

import errno
import fcntl
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from draftmill.contracts.errors import StorageError
from draftmill.storage.local import LOCK_FILE, no_room
from draftmill.storage.store import open_store

# A run whose launcher was killed may need a moment to notice: who starts it again at once is not turned away.
PATIENCE_S = 5.0
_POLL_S = 0.1
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def sole_writer(urls: Sequence[str], patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Within, no other process (or call) is the sole writer of any local folder among `urls`, which are made.

    StorageError naming who is, once it was waited for.
    """
    stores = [open_store(url, create=True) for url in urls]
    folders = {store.folder.resolve() for store in stores if store.folder is not None}
    with ExitStack() as held:
        for folder in sorted(folders):  # in one order, so that two runs never wait for each other
            held.enter_context(_held(folder / LOCK_FILE, time.monotonic() + patience_s))
        yield


@contextmanager
def _held(path: Path, until: float) -> Iterator[None]:
    descriptor = _take(path, until)
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: nobody else's goes
        os.close(descriptor)


def _take(path: Path, until: float) -> int:
    """A descriptor that holds the lock of the file that `path` names."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise no_room(error, path) from error
        if _locks(descriptor, path) and _is_still(path, descriptor):
            return descriptor
        holder = os.read(descriptor, 200).decode(errors="replace")
        os.close(descriptor)
        if time.monotonic() > until:
            raise StorageError(
                f"{path.parent} is being written by another run of draftmill ({holder or 'which has just begun'}): "
                "wait for its end, or name another --output"
            )
        time.sleep(_POLL_S)


def _locks(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # a disk that knows no locks keeps nobody out
            os.close(descriptor)
            raise StorageError(f"{path} cannot be locked: {error.strerror}") from error
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the locked file is the one that others find: its last holder may have removed it meanwhile."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
