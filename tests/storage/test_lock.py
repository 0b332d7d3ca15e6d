"""A local folder has one writer at a time; whoever ends, however it ends, makes room for the next at once."""

import signal
import subprocess
import sys
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


def test_a_second_writer_is_refused_while_the_first_lives_and_let_in_once_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
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
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        holder.kill()  # and not awaited
        with sole_writer([str(tmp_path)]):
            pass


def test_the_lock_is_no_part_of_the_folder_and_one_folder_named_twice_is_held_once(tmp_path: Path) -> None:
    link = tmp_path / "link"
    (tmp_path / "run").mkdir()
    link.symlink_to(tmp_path / "run")
    with sole_writer([str(link), str(tmp_path / "run"), str(tmp_path / "run")], patience_s=0):
        assert (tmp_path / "run" / LOCK_FILE).is_file()
        assert open_store(str(tmp_path / "run")).files() == []
