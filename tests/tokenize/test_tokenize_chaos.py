"""Killed at any moment, on a network that drops, cuts, delays and refuses, runs end in the same bytes, no row untold.

`make test` kills three times, `make test-chaos` thirty: the run itself, its nursery, or one of its workers.
"""

import gzip
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pyarrow as pa
import pytest

from completions import row, write_rows
from draftmill.storage.store import open_store
from storage.unruly_proxy import WELL_BEHAVED, Faults, UnrulyProxy
from tiny_tokenizer import write_tiny_tokenizer

UNRULY = Faults(drop=0.04, lose_answer=0.04, truncate=0.04, refuse=0.05, delay=0.2, longest_delay_s=0.05)
KILLS = int(os.environ.get("DRAFTMILL_KILLS", "30"))
_MAX_STARTS_PER_KILL = 3
_LENIENT = {"max-spike-frac": 1, "max-duplicate-frac": 1, "max-dropped-frac": 1}
_RUN = "import sys; from draftmill.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    write_tiny_tokenizer(tmp_path / "tokenizer")
    return tmp_path


def _rows(name: str, count: int) -> list[dict[str, Any] | bytes]:
    """Rows of a file: some torn, some whose id another row of this or the first file has."""
    rows: list[dict[str, Any] | bytes] = [row(i % 40, id=f"{name} {i}") for i in range(count)]
    rows[count // 2] = b'{"torn": '
    rows[count // 3] = row(7, id=f"{name} 1")
    rows[-1] = row(9, id="a.jsonl 3")
    return rows


def _write_inputs(url: str, folder: Path, scale: int) -> int:
    """Puts a large plain file, a small one of an odd key and two packed ones into the store; how many rows that is."""
    store = open_store(url)
    plain = write_rows(folder / "a", _rows("a.jsonl", 100 * scale))
    store.put("a.jsonl", plain)
    store.put("deep/b 1%20+ü.jsonl", write_rows(folder / "b", _rows("b", 10 * scale)))
    store.put("c.jsonl.gz", gzip.compress(write_rows(folder / "c", _rows("c", 10 * scale)).read_bytes()))
    packed = pa.compress(write_rows(folder / "d", _rows("d", 10 * scale)).read_bytes(), codec="zstd", asbytes=True)
    store.put("d.jsonl.zst", packed)
    return 130 * scale


@dataclass
class Killer:
    """Starts one command again and again, and kills one of its processes at a random moment each time."""

    command: list[str]
    chance: random.Random
    longest_s: float
    kills: int = 0
    victims: list[str] = field(default_factory=list)
    starts: int = 0

    def until_done(self, num_kills: int) -> None:
        """Runs until the command has ended well; it is killed at most `num_kills` times in all."""
        while True:
            self.starts += 1
            process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            while self.kills < num_kills and self._waits(process):
                self._kill_one(process)
            said = process.communicate()[1]
            if process.returncode == 0:
                return
            may_fail = process.returncode == -signal.SIGKILL or "has cost 2 worker processes" in said
            assert may_fail, said[-3000:]
            assert self.starts <= _MAX_STARTS_PER_KILL * num_kills, "it gets nowhere"

    def _waits(self, process: "subprocess.Popen[str]") -> bool:
        """Lets it run for a random time; whether it is still running."""
        try:
            process.wait(self.chance.random() * self.longest_s)
        except subprocess.TimeoutExpired:
            return True
        return False

    def _kill_one(self, process: "subprocess.Popen[str]") -> None:
        """Kills the run, its nursery or a worker, as soon as there is one."""
        kind = self.chance.choice(("run", "run", "nursery", "worker"))
        try:
            while not (found := _members(process, kind)):
                if process.poll() is not None:
                    return
                time.sleep(0.01)
            self.chance.choice(found).kill()
        except psutil.NoSuchProcess:
            return
        self.kills += 1
        self.victims.append(kind)


def _members(process: "subprocess.Popen[str]", kind: str) -> list[psutil.Process]:
    """The processes of a run that are of a kind, as far as they exist."""
    run = psutil.Process(process.pid)
    nurseries = [] if kind == "run" else run.children()
    if kind == "worker":
        return [worker for nursery in nurseries for worker in nursery.children()]
    return [run] if kind == "run" else nurseries


def _command(place: Path, url: str, outputs: list[str], part_bytes: int, workers: int) -> list[str]:
    flags = {"input": url, "tokenizer": place / "tokenizer", "part-bytes": part_bytes, "workers": workers, **_LENIENT}
    words = [f"--{key}={value}" for key, value in flags.items()] + [f"--output={output}" for output in outputs]
    return [sys.executable, "-c", _RUN, "tokenize", *words]


def _files(url: str) -> dict[str, bytes]:
    store = open_store(url)
    return {file.key: store.get(file.key) for file in store.files() if file.key != "card.json"}


def _content(url: str) -> Any:
    return msgspec.json.decode(open_store(url).get("card.json"))


def _disturbed(place: Path, lake: UnrulyProxy, scale: int, num_kills: int) -> Killer:
    url = f"{lake.url}/in"
    num_rows = _write_inputs(url, place, scale)
    part_bytes = 1_600 * scale
    started = time.monotonic()
    whole = str(place / "undisturbed")
    subprocess.run(_command(place, url, [whole], part_bytes, 2), check=True, capture_output=True)
    lake.faults = UNRULY
    killer = Killer([], random.Random(num_kills), longest_s=1.2 * (time.monotonic() - started))
    lives = 0
    while killer.kills < num_kills:
        outputs = [str(place / f"life-{lives}"), f"{lake.url}/life-{lives}"]
        killer.command = _command(place, url, outputs, part_bytes, 2 + lives % 2)
        killer.until_done(num_kills)
        lake.faults = WELL_BEHAVED
        for output in outputs:
            assert _files(output) == _files(whole)
            assert _content(output)["content_hash"] == _content(whole)["content_hash"]
        lake.faults = UNRULY
        lives += 1
    content = _content(whole)["content"]
    assert content["rows_in"] == num_rows == content["rows"] + len(content["dropped_rows"])
    assert content["dropped"] == {"broken JSON": 4, "duplicate id": 8} and len(content["parts"]) > 10
    assert not list((place / "cache" / "spool").iterdir()) and not list(place.glob("life-*/*.tmp-*"))
    return killer


def test_three_kills_on_an_unruly_network_change_nothing(place: Path, lake: UnrulyProxy):
    killer = _disturbed(place, lake, scale=10, num_kills=3)
    assert killer.kills == 3, killer


@pytest.mark.chaos
def test_thirty_kills_on_an_unruly_network_change_nothing(place: Path, lake: UnrulyProxy):
    killer = _disturbed(place, lake, scale=100, num_kills=KILLS)
    assert killer.kills == KILLS and set(killer.victims) == {"run", "nursery", "worker"}, killer
    assert sum(lake.fates[fate] for fate in ("drop", "lose_answer", "truncate", "refuse")) > KILLS, lake.fates
