"""The spool: one run at a time owns it, and the next one takes up what a killed one left, unless the host restarted."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draftmill.contracts.errors import StorageError
from draftmill.storage.cache import spool_folder


@pytest.fixture
def spools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path))
    return tmp_path / "spool"


HOLD = """
import sys
from draftmill.storage.cache import spool_folder
with spool_folder("name") as folder:
    (folder / "file").write_text("whole")
    print(folder, flush=True)
    sys.stdin.read()
"""


def _hold() -> tuple["subprocess.Popen[str]", Path]:
    held = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert held.stdout is not None
    return held, Path(held.stdout.readline().strip())


def _end(held: "subprocess.Popen[str]", kill: bool) -> None:
    if kill:
        held.send_signal(signal.SIGKILL)
    held.communicate()


def test_a_run_that_ends_well_leaves_nothing(spools: Path):
    with spool_folder("name") as folder:
        (folder / "file").touch()
    assert list(spools.iterdir()) == []


def test_what_a_killed_or_failed_run_left_is_taken_up(spools: Path):
    held, place = _hold()
    _end(held, kill=True)
    with pytest.raises(ZeroDivisionError), spool_folder("name") as folder:
        assert folder == place and (folder / "file").read_text() == "whole"
        raise ZeroDivisionError
    with spool_folder("name") as folder:
        assert (folder / "file").read_text() == "whole"


def test_a_second_run_has_a_folder_of_its_own(spools: Path):
    held, place = _hold()
    with spool_folder("name") as folder:
        assert folder == spools / f"name-{os.getpid()}" and not (folder / "file").exists()
    assert (place / "file").exists()
    _end(held, kill=False)
    assert list(spools.iterdir()) == []


def test_private_folders_of_dead_runs_are_removed(spools: Path):
    first, _ = _hold()
    second, private = _hold()
    _end(second, kill=True)
    _end(first, kill=False)
    assert private.exists()
    with spool_folder("name"):
        assert not private.exists()


def test_after_a_restart_of_the_host_nothing_is_trusted(spools: Path):
    held, place = _hold()
    _end(held, kill=True)
    (place / "boot").write_text("an earlier one")
    with spool_folder("name") as folder:
        assert not (folder / "file").exists()


def test_a_cache_that_is_no_folder_is_named_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cache").touch()
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(StorageError, match="name another local folder by DRAFTMILL_CACHE"), spool_folder("a"):
        pass
