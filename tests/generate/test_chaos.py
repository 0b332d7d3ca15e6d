"""Disturbed at any moment by anything, a served run ends with every prompt exactly once, each part as its record says.

Kills of the client and of the engine, storms of 503, resets in mid-body, stalls, and a disk that is full: at moments
that a seed gives, counted in rows done. After each the same command is run again until it ends well.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from completion_sets import card_of, check_parts, check_whole, records_of
from generate.served_runs import Desk, StubProcess
from tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.slow

NUM_PROMPTS = 120
DISTURBANCES = ("kill", "engine", "503", "reset", "stall=0.5", "disk")
ROUNDS = 6
A_ROUND = 5


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def stub(tokenizer: Path) -> Iterator[StubProcess]:
    stub = StubProcess("--tokenizer", str(tokenizer), "--latency-s", "0.15", "--answer-tokens", "60")
    yield stub
    stub.kill()


class Story:
    """One set, disturbed again and again."""

    def __init__(self, desk: Desk, stub: StubProcess, seed: int) -> None:
        self.desk = desk
        self.stub = stub
        self.rng = random.Random(seed)
        self.told: list[str] = []

    def disturbed(self, disturbances: list[str]) -> None:
        """Runs the set through all of them."""
        for disturbance in disturbances:
            if (self.desk.out / "card.json").exists():  # it was quick: begin another
                self.check()
                shutil.rmtree(self.desk.out)
            self.disturb(disturbance)
            check_parts(self.desk.out)
        self.end_well()
        self.check()
        print(self.told)

    def disturb(self, disturbance: str) -> None:
        limit = self.rng.randrange(1500, 9000) if disturbance == "disk" else None
        process = self.desk.start(self.stub.url, limit_bytes=limit)
        if disturbance != "disk":
            self.wait(process, self.rng.randrange(NUM_PROMPTS // 3))
        self.told.append(f"{disturbance} at {self.num_done()} rows")
        if disturbance == "kill":
            process.kill()
        elif disturbance == "engine":
            self.stub.kill()
            time.sleep(self.rng.uniform(0, 0.5))
            self.stub.start_again()
        elif disturbance != "disk":
            self.stub.storm(disturbance, self.rng.uniform(0.1, 0.6))
        if disturbance in ("engine", "kill", "disk") or self.rng.random() < 0.5:
            self.ended(process)
        else:  # killed in the middle of the storm
            time.sleep(self.rng.uniform(0, 0.3))
            os.kill(process.pid, signal.SIGKILL)
            self.ended(process)

    def wait(self, process: "subprocess.Popen[str]", num_rows: int) -> None:
        """Until so many rows more are done, or it has ended."""
        goal = self.num_done() + num_rows
        while self.num_done() < goal and process.poll() is None:
            time.sleep(0.005)

    def num_done(self) -> int:
        return len(self.desk.spooled()) + sum(record["rows"] for record in records_of(self.desk.out))

    def ended(self, process: "subprocess.Popen[str]") -> None:
        _, stderr = process.communicate(timeout=120)
        self.told.append(f"exit {process.returncode}")
        assert "Traceback" not in stderr, stderr
        assert process.returncode in (0, 1, 3, -signal.SIGKILL), stderr

    def end_well(self) -> None:
        for _ in range(5):
            process = self.desk.start(self.stub.url)
            self.ended(process)
            if process.returncode == 0 and not card_of(self.desk.out)["failed"]:
                return
        raise AssertionError(f"not done after five reruns: {self.told}")

    def check(self) -> None:
        check_whole(self.desk.out, (f"r{n}" for n in range(NUM_PROMPTS)))


def begin(folder: Path, tokenizer: Path, stub: StubProcess, seed: int) -> Story:
    limits = {"max_in_flight": 6, "max_attempts": 4, "max_failures_in_row": 5, "min_timeout_s": 5}
    desk = Desk(folder, tokenizer, {"part_rows": 15, **limits})
    desk.prompts([f"prompt {n}" for n in range(NUM_PROMPTS)])
    return Story(desk, stub, seed)


def test_three_disturbances_lose_nothing_and_double_nothing(tmp_path: Path, tokenizer: Path, stub: StubProcess) -> None:
    begin(tmp_path, tokenizer, stub, seed=11).disturbed(["kill", "disk", "503"])


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_thirty_disturbances_lose_nothing_and_double_nothing(
    seed: int, tmp_path: Path, tokenizer: Path, stub: StubProcess
) -> None:
    drawn = random.Random(seed)
    disturbances = [*drawn.sample(DISTURBANCES, k=A_ROUND)]
    begin(tmp_path, tokenizer, stub, seed).disturbed(disturbances)
