"""A training run small enough to be started many times, and stories for ranks, which import them by name."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from draftmill.chat.chat import open_chat
from draftmill.contracts.errors import DataGateError
from draftmill.settings.train import TrainSettings
from sample_sets import GivenSample, write_samples
from tiny import write_tiny_target

NUM_STEPS = 6
SAVE_EVERY = 3
SAMPLES = 11


def write_small_run(place: Path) -> Path:
    """Writes target and samples of unequal lengths and masks; returns the folder."""
    write_tiny_target(place / "target", num_layers=4, hidden_size=32)
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


PLACEMENTS: dict[str, dict[str, object]] = {
    "shared 2": {"ranks": 2},
    "shared 4": {"ranks": 4},
    "split 1+1": {"placement": "split"},
    "split 2+1": {"placement": "split", "target_ranks": 2},
    "split 1+2": {"placement": "split", "drafter_ranks": 2},
    "split 2+2": {"placement": "split", "target_ranks": 2, "drafter_ranks": 2},
    "gone on by 2+2": {"placement": "split", "target_ranks": 2, "drafter_ranks": 2},
}
PORTS = "DRAFTMILL_TEST_PORTS"
"""Where the ranks of each of these find one another; a store serves one world only."""


def run_placements(settings: TrainSettings) -> dict[str, Any]:
    """The story of one of four ranks: one run after another, as torchrun would start it, in folders of their own."""
    from draftmill.train.run import run

    rank, cards = int(os.environ["RANK"]), {}
    ports = os.environ[PORTS].split()
    for port, (name, changed) in zip(ports, PLACEMENTS.items(), strict=True):
        chosen = TrainSettings(**{**settings.model_dump(), **changed, "output": (f"{settings.output[0]}/{name}",)})
        split = chosen.placement == "split"
        world = chosen.target_ranks + chosen.drafter_ranks if split else chosen.ranks or 1
        if rank < world:
            os.environ |= {"WORLD_SIZE": str(world), "MASTER_PORT": port}
            cards[name] = run(chosen)
    return cards


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
