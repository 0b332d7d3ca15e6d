"""The local cache: targets converted from packages, and objects fetched from a store, named by their sha256."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """`$DRAFTMILL_CACHE`, or `draftmill` below the user's cache folder."""
    if chosen := os.environ.get("DRAFTMILL_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "draftmill"


@contextmanager
def spool_folder(name: str) -> Iterator[Path]:
    """An empty local folder for files that are not published yet; removed at the end, whatever a killed run left."""
    folder = cache_folder() / "spool" / name
    shutil.rmtree(folder, ignore_errors=True)
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
