"""A run goes on without what it would tell people: with stderr closed, its reader gone, or its disk full."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOLD = """
import os, sys
from draftmill.streams import secure_streams

secure_streams()
from draftmill.progress import Progress

with open(sys.argv[1], "w") as kept:
    progress = Progress("task", total=3, unit="rows", clock=iter(range(0, 600, 60)).__next__)
    for _ in range(3):
        progress.advance(1)
    for stream in range(3):
        assert os.get_inheritable(stream), "a child finds none of its streams closed"
    kept.write("whole")
print("done")
"""


def _told(kept: Path, redirection: str) -> "subprocess.CompletedProcess[str]":
    """Runs TOLD with what a shell makes of the redirection."""
    words = ["sh", "-c", f'exec "$0" -c "$1" "$2" {redirection}', sys.executable, TOLD, str(kept)]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "2>&- <&-"])
def test_progress_that_nobody_can_read_stops_nothing(tmp_path: Path, redirection: str):
    done = _told(tmp_path / "kept", redirection)
    assert (done.returncode, done.stdout, (tmp_path / "kept").read_text()) == (0, "done\n", "whole")


def test_a_reader_that_has_left_costs_nothing_but_the_lines(tmp_path: Path):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", TOLD, str(tmp_path / "kept")], stdout=subprocess.PIPE, stderr=writing, text=True
    )
    os.close(writing)
    assert (done.returncode, done.stdout, (tmp_path / "kept").read_text()) == (0, "done\n", "whole")


def test_who_listens_hears_every_line_at_once(tmp_path: Path):
    done = _told(tmp_path / "kept", "")
    assert [line.split("  ")[0] for line in done.stderr.splitlines()] == [f"task: {n}/3 rows" for n in (1, 2, 3)]
