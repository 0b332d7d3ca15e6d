"""The local cache: targets converted from packages, and objects fetched from a store, named by their sha256."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


def cache_folder() -> Path:
    """`$DRAFTMILL_CACHE`, or `draftmill` below the user's cache folder."""
    if chosen := os.environ.get("DRAFTMILL_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "draftmill"


@contextmanager
def spool_folder(name: str) -> Iterator[Path]:
    """An empty local folder, this process's own, for files that are not published yet; removed at the end.

    What runs that were killed left under the same name is removed too.
    """
    spools = cache_folder() / "spool"
    for left in spools.glob(f"{name}-*"):
        if not psutil.pid_exists(int(left.name.rpartition("-")[2])):
            shutil.rmtree(left, ignore_errors=True)
    folder = spools / f"{name}-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes `path` whole or not at all: a temporary name beside it, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with draft.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(path)
