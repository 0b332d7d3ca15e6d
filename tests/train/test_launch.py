"""Ranks end together: the one that fell first is named, and the command exits as that rank would have by itself."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")
from draftmill.settings.train import TrainSettings
from draftmill.train.launch import RankFailedError, Story, start_ranks
from draftmill.train.layout import Layout
from small_run import (
    be_killed,
    blame_another,
    differ,
    fall_over,
    refuse,
    say,
    say_nothing,
    small_settings,
    write_small_run,
)

pytestmark = pytest.mark.torch

SETTINGS = TrainSettings(input="i", output=("o",), target="t", rank_timeout_s=100)
SPLIT = Layout(num_drafters=2, num_targets=1, is_split=True)


def test_ranks_have_the_callers_environment_and_rank_0_says_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("here", "there"):
        monkeypatch.setenv("DRAFTMILL_TEST_PLACE", place)
        said = start_ranks(say, SETTINGS.model_copy(update={"ranks": 2}), Layout(2, 2, is_split=False))
        assert said == {"layout": "rank 0 of 2", "place": place}


@pytest.mark.parametrize(
    ("story", "exit_code", "message"),
    [
        (be_killed, 1, r"rank 1 \(drafter 1\) was ended by SIGKILL, and the others were ended with it"),
        (refuse, 3, r"rank 1 \(drafter 1\): too few of them"),
        (blame_another, 3, r"rank 1 \(drafter 1\): too few of them"),
        (fall_over, 1, r"rank 1 \(drafter 1\) ended with exit code 1 \(see above\)"),
        (differ, 1, r"ended with exit code 1 \(see above\)"),
    ],
)
def test_the_rank_that_fell_is_named_and_nobody_outlives_it(story: Story, exit_code: int, message: str) -> None:
    settings = TrainSettings(
        **{"input": "i", "output": ("o",), "target": "t", "rank_timeout_s": 100},  # type: ignore[arg-type]
        **{"placement": "split", "drafter_ranks": 2},  # type: ignore[arg-type]
    )
    start = time.monotonic()
    with pytest.raises(RankFailedError, match=message) as failure:
        start_ranks(story, settings, SPLIT)
    assert failure.value.exit_code == exit_code
    assert time.monotonic() - start < 60


def test_a_rank_that_lives_and_says_nothing_is_waited_for_as_long_as_is_set() -> None:
    settings = SETTINGS.model_copy(update={"placement": "split", "drafter_ranks": 2, "rank_timeout_s": 15})
    with pytest.raises(RankFailedError, match=r"lost another rank while figures are added up \([^/]*\): look"):
        start_ranks(say_nothing, settings, SPLIT)


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    settings = small_settings(write_small_run(tmp_path), tmp_path / "run", ranks=2, num_steps=100_000)
    chosen = settings.model_dump(exclude_defaults=True) | {"output": str(tmp_path / "run")}
    flags = [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    launcher = psutil.Popen([sys.executable, "-m", "draftmill.cli", "train", *flags], stderr=subprocess.DEVNULL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.is_file():
        assert launcher.poll() is None, "the run begins"
        time.sleep(0.1)
    family = launcher.children(recursive=True)
    assert len(family) >= 3, "a fork server and two ranks"
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        process.kill()
    assert not alive
