"""A local folder has one writer at a time; whoever ends, however it ends, makes room for the next at once."""

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from draftmill.contracts.errors import StorageError
from draftmill.storage.local import LOCK_FILE
from draftmill.storage.lock import sole_writer
from draftmill.storage.store import open_store

HOLD = """
import sys, time
from draftmill.storage.lock import sole_writer
with sole_writer(sys.argv[1:]):
    print("held", flush=True)
    time.sleep(600)
"""
# Of these many writers some have always met the moment that is looked for, between two system calls of another.
NUM_WRITERS, NUM_TURNS = 16, 50


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is the folder's sole writer until it is killed."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            yield holder
        finally:
            holder.kill()


def test_a_second_writer_is_refused_while_the_first_lives_and_let_in_once_it_is_killed(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as holder:
        refused = pytest.raises(StorageError, match=f"process {holder.pid} on .*another --output")
        with refused, sole_writer([str(tmp_path / "b"), str(tmp_path)], patience_s=0):
            pass
        with sole_writer([str(tmp_path / "b")], patience_s=0):  # nothing was kept of what was refused
            pass
        holder.send_signal(signal.SIGKILL)
    assert (tmp_path / LOCK_FILE).is_file()
    with sole_writer([str(tmp_path)], patience_s=0):
        pass
    assert not (tmp_path / LOCK_FILE).exists()


def test_one_who_ends_soon_is_waited_for(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as holder:
        holder.kill()  # and not awaited
        with sole_writer([str(tmp_path)]):
            pass


def test_writers_that_come_and_go_are_never_two_at_a_time(tmp_path: Path) -> None:
    """Whoever leaves removes the file, which another may have opened already to lock what nobody else finds."""
    inside: list[int] = []

    def come_and_go(number: int) -> None:
        for _ in range(NUM_TURNS):
            with sole_writer([str(tmp_path)], patience_s=60):
                inside.append(number)
                time.sleep(0.0005)
                assert inside == [number]
                inside.pop()

    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        list(pool.map(come_and_go, range(NUM_WRITERS)))


def test_the_lock_is_no_part_of_the_folder_and_one_folder_named_twice_is_held_once(tmp_path: Path) -> None:
    link = tmp_path / "link"
    (tmp_path / "run").mkdir()
    link.symlink_to(tmp_path / "run")
    with sole_writer([str(link), str(tmp_path / "run"), str(tmp_path / "run")], patience_s=0):
        assert (tmp_path / "run" / LOCK_FILE).is_file()
        assert open_store(str(tmp_path / "run")).files() == []


def test_a_lock_says_who_holds_it_and_nothing_of_who_did_before_and_leaves_no_file_open(tmp_path: Path) -> None:
    left = tmp_path / LOCK_FILE
    left.write_text("process 4000000000 on a host of a very long name, killed as it wrote")
    with sole_writer([str(tmp_path)], patience_s=0):
        assert left.read_text() == f"process {os.getpid()} on {platform.node()}"
    assert not files_open_below(tmp_path)


def files_open_below(folder: Path) -> list[Path]:
    """What this process has open of a folder, files that are removed already included."""
    found: list[Path] = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # other threads close theirs
            found.append(descriptor.readlink())
    return [path for path in found if path.is_relative_to(folder)]
