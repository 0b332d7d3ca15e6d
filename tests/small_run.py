"""A training run small enough to be started many times, and stories for ranks, which import them by name."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftmill.chat.chat import open_chat
from draftmill.contracts.errors import DataGateError
from draftmill.settings.train import TrainSettings
from draftmill.storage.checkpoints import step_folder
from sample_sets import GivenSample, write_samples
from tiny import write_tiny_target

NUM_STEPS = 6
SAVE_EVERY = 3
SAMPLES = 11


def write_small_run(place: Path, hidden_size: int = 32, family: Literal["llama", "qwen3_5"] = "llama") -> Path:
    """Writes target and samples of unequal lengths and masks; returns the folder."""
    write_tiny_target(place / "target", num_layers=4, hidden_size=hidden_size, family=family)
    rng = np.random.default_rng(0)
    given: list[GivenSample] = [
        (f"s{i}", rng.integers(0, 256, n).tolist(), [t >= n // 3 and t % 11 > 0 for t in range(n)])
        for i, n in enumerate(rng.integers(15, 60, SAMPLES).tolist())
    ]
    write_samples(place / "samples", given, open_chat(place / "target").tokenizer_hash)
    return place


def small_settings(folder: Path, *output: Path | str, **changed: object) -> TrainSettings:
    """Settings of a run of it: four rows of one to three samples a step, and several epochs."""
    chosen: dict[str, object] = {
        "num_layers": 1,
        "num_taps": 1,
        "block_size": 4,
        "max_tokens": 100,
        "num_anchors": 14,
        "rows_per_step": 4,
        "num_steps": NUM_STEPS,
        "save_every": SAVE_EVERY,
        "keep_checkpoints": 2,
        "lr": 2e-3,
        "min_agreement": 0.0,  # neither target nor set means anything
        "rank_timeout_s": 120,
        **changed,
    }
    return TrainSettings(
        input=str(folder / "samples"),
        output=tuple(map(str, output)),
        target=str(folder / "target"),
        **chosen,  # type: ignore[arg-type]
    )


def stop_at(output: Path, copy: Path, step: int) -> None:
    """A copy of a finished run's output as it stood when it had made `step` steps."""
    shutil.copytree(output, copy)
    (copy / "card.json").unlink()
    for folder in (copy / "checkpoints").iterdir():
        if folder.name > step_folder(step).rpartition("/")[2]:
            shutil.rmtree(folder)


def train_command(settings: TrainSettings) -> list[str]:
    """The command line that asks for these settings."""
    given = settings.model_dump(exclude_defaults=True, exclude={"output"})
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return [sys.executable, "-m", "draftmill", "train", *flags, *(f"--output={place}" for place in settings.output)]


PLACEMENTS: dict[str, dict[str, object]] = {
    "shared 2": {"ranks": 2},
    "shared 4": {"ranks": 4},
    "split 1+1": {"placement": "split"},
    "split 2+1": {"placement": "split", "target_ranks": 2},
    "split 1+2": {"placement": "split", "drafter_ranks": 2},
    "split 2+2": {"placement": "split", "target_ranks": 2, "drafter_ranks": 2},
    "gone on by 2+2": {"placement": "split", "target_ranks": 2, "drafter_ranks": 2},
}
_TURNS = "DRAFTMILL_TEST_TURNS"


def run_in_turn(settings: TrainSettings, num_ranks: int, turns: Sequence[dict[str, object]]) -> None:
    """Runs one after the other by the first so many of `num_ranks` ranks, which are started once; a turn says how its
    run's settings differ."""
    import pytest
    from torch.distributed import TCPStore

    from draftmill.train.launch import HOST, start_ranks
    from draftmill.train.layout import Layout

    stores = [TCPStore(HOST, 0, is_master=True, wait_for_workers=False) for _ in turns]  # a store serves one world only
    ports = [str(store.port) for store in stores]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_TURNS, json.dumps(list(zip(ports, turns, strict=True))))
        start_ranks(take_turns, settings, Layout(num_ranks, num_ranks, is_split=False))


def take_turns(settings: TrainSettings) -> dict[str, Any]:
    """The story of one of the ranks: one run after another, as torchrun would start it."""
    from draftmill.train.run import run

    for port, changed in json.loads(os.environ[_TURNS]):
        chosen = TrainSettings(**{**settings.model_dump(), **changed})
        split = chosen.placement == "split"
        world = chosen.target_ranks + chosen.drafter_ranks if split else chosen.ranks or 1
        if int(os.environ["RANK"]) < world:
            os.environ |= {"WORLD_SIZE": str(world), "MASTER_PORT": port}
            run(chosen)
    return {}


def be_killed(settings: TrainSettings) -> dict[str, Any]:
    """A story in which rank 1 is killed while the others wait for it."""
    from draftmill.train.ranks import joined

    with joined(settings) as ranks:
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.check_equal([])
    return {}


def refuse(settings: TrainSettings) -> dict[str, Any]:
    """A story in which rank 1 refuses the data while the others wait for it."""
    from draftmill.train.ranks import joined

    with joined(settings) as ranks:
        if ranks.rank == 1:
            raise DataGateError("too few of them")
        ranks.check_equal([])
    return {}


def blame_another(settings: TrainSettings) -> dict[str, Any]:
    """A story in which rank 0 loses rank 1, and ends before rank 1 has said what was wrong."""
    from draftmill.train.ranks import RankLostError, joined

    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with joined(settings) as ranks:  # so that rank 1 does ignore it by now
        if ranks.rank == 1:
            time.sleep(1)
            raise DataGateError("too few of them")
        raise RankLostError("rank 1 is gone")


def say_nothing(settings: TrainSettings) -> dict[str, Any]:
    """A story in which rank 1 lives, and takes far longer than it is waited for."""
    from draftmill.train.metrics import StepSums
    from draftmill.train.ranks import joined

    with joined(settings) as ranks:
        if ranks.rank == 1:
            time.sleep(3 * settings.rank_timeout_s)
        ranks.add_figures(StepSums.empty(1))
    return {}


def fall_over(settings: TrainSettings) -> dict[str, Any]:
    """A story in which rank 1 meets a fault of ours while the others are still being called together."""
    from draftmill.train.ranks import joined

    assert os.environ["RANK"] != "1", "a fault"
    with joined(settings):
        return {}


def differ(settings: TrainSettings) -> dict[str, Any]:
    """A story in which rank 1 holds other weights than the others."""
    import torch

    from draftmill.train.ranks import joined

    with joined(settings) as ranks:
        ranks.check_equal([torch.nn.Parameter(torch.ones(3))])
        weights = torch.ones(3)
        weights[1] += 1e-7 * (ranks.rank == 1)
        ranks.check_equal([torch.nn.Parameter(weights)])
    return {}


def say(settings: TrainSettings) -> dict[str, Any]:
    """A story that says where it was called from."""
    from draftmill.train.ranks import joined

    with joined(settings) as ranks:
        return ranks.tell({"layout": ranks.layout.name(0), "place": os.environ["DRAFTMILL_TEST_PLACE"]}) or {}
