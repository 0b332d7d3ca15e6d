"""Killed at any moment, whichever rank it hits, and started again in another placement, a run ends in the same bytes.

`make test` kills three times, `make test-chaos` twenty-five. Placements with one drafter rank add up in one order, and
so do those with two: within such a family every start may be another one.
"""

import json
import os
import random
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

torch = pytest.importorskip("torch")
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.train.launch import RankFailedError, start_ranks  # noqa: E402
from draftmill.train.layout import layout_of  # noqa: E402
from draftmill.train.run import run  # noqa: E402
from small_run import PLACEMENTS, small_settings, write_small_run  # noqa: E402

pytestmark = pytest.mark.torch

KILLS = int(os.environ.get("DRAFTMILL_KILLS", "25"))
ONE_DRAFTER = ("split 1+1", "split 2+1")
TWO_DRAFTERS = ("shared 2", "split 1+2", "split 2+2")
# A start of its own for every kill, and some that are done before they are hit.
MAX_STARTS_PER_KILL = 4
END_S = 60.0
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL)
# Forking the ranks, and telling them what to do.
START_S = 0.5


@dataclass
class Killer:
    """Starts a run again and again until it is done, and kills one of its ranks at a random moment."""

    folder: Path
    changed: dict[str, object]
    chance: random.Random
    longest_s: float
    kills: list[str] = field(default_factory=list)

    def until_done(self, output: Path, placements: tuple[str, ...], num_kills: int) -> int:
        """Runs to the end, disturbed until it was killed `num_kills` times; how often it was started."""
        hits = starts = 0
        while True:
            starts += 1
            assert starts <= MAX_STARTS_PER_KILL * (num_kills + 1), "it gets nowhere"
            settings = self.settings(output, self.chance.choice(placements))
            with ThreadPoolExecutor(1) as pool:
                going = pool.submit(start_ranks, run, settings, layout_of(settings))
                hits += hits < num_kills and self._hit(going)
                try:
                    going.result(END_S + self.longest_s)
                    return starts
                except RankFailedError as error:
                    assert "rank " in str(error), error

    def settings(self, output: Path, placement: str) -> TrainSettings:
        """The run's settings in one placement."""
        return small_settings(self.folder, output, **self.changed, **PLACEMENTS[placement])

    def _hit(self, going: "Future[dict[str, Any]]") -> bool:
        """Kills or terminates a rank at a random moment; False where the run was done before, or not begun."""
        with suppress(TimeoutError):
            going.result(self.chance.random() * self.longest_s)
            return False
        ranks = [rank for server in psutil.Process().children() for rank in server.children()]
        if not ranks:
            return False
        number = SIGNALS[len(self.kills) % len(SIGNALS)]
        try:
            self.chance.choice(ranks).send_signal(number)
        except psutil.NoSuchProcess:
            return False
        self.kills.append(signal.Signals(number).name)
        before = time.monotonic()
        wait([going], END_S)
        assert time.monotonic() - before < END_S, "all ranks end with the one that was hit"
        return True


def contents(output: Path) -> dict[str, bytes]:
    """Every file of every checkpoint."""
    return {str(p.relative_to(output)): p.read_bytes() for p in sorted(output.glob("checkpoints/*/*"))}


def losses(output: Path) -> list[tuple[int, float]]:
    """What the log says of every step."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def disturbed(folder: Path, placements: tuple[str, ...], num_kills: int, per_life: int) -> Killer:
    """Lives of one run, each from start to end under several kills, all ending as the undisturbed one does."""
    write_small_run(folder)
    changed: dict[str, object] = {"num_steps": 60, "save_every": 3, "draws_per_pass": 2}
    killer = Killer(folder, changed, random.Random(num_kills), longest_s=0.0)
    settings = killer.settings(folder / "undisturbed", placements[-1])
    killer.longest_s = START_S + start_ranks(run, settings, layout_of(settings))["run"]["seconds"]
    lives = 0
    while len(killer.kills) < num_kills:
        output = folder / f"life-{lives}"
        killer.until_done(output, placements, min(per_life, num_kills - len(killer.kills)))
        assert contents(output) == contents(folder / "undisturbed")
        assert losses(output) == losses(folder / "undisturbed")
        lives += 1
    return killer


def test_three_kills_change_nothing(tmp_path: Path) -> None:
    assert len(disturbed(tmp_path, ("split 1+1",), num_kills=3, per_life=3).kills) == 3


@pytest.mark.chaos
@pytest.mark.parametrize("placements", [ONE_DRAFTER, TWO_DRAFTERS], ids=["one drafter", "two drafters"])
def test_many_kills_change_nothing_whatever_the_placement_of_each_start(
    tmp_path: Path, placements: tuple[str, ...]
) -> None:
    killer = disturbed(tmp_path, placements, num_kills=-(-KILLS // 2), per_life=5)
    assert set(killer.kills) == {"SIGKILL", "SIGTERM"}, killer.kills
