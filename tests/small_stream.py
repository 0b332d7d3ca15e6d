"""A run on a tokenized set that tests make part by part, small enough to be started many times."""

from pathlib import Path

import numpy as np

from draftmill.chat.chat import open_chat
from draftmill.settings.train import TrainSettings
from draftmill.train.data import open_input, read_data
from draftmill.train.run import run
from sample_sets import GivenSample, Producer
from small_run import small_settings

NUM_PARTS, NUM_SAMPLES = 5, 15
rng = np.random.default_rng(1)
SAMPLES: list[GivenSample] = [
    (f"s{i}", rng.integers(0, 256, n).tolist(), [t >= n // 3 for t in range(n)])
    for i, n in enumerate(rng.integers(15, 60, NUM_SAMPLES).tolist())
]


def stream_settings(target: Path, samples: Path | str, output: Path, **changed: object) -> TrainSettings:
    """Settings of a run: a row a step, all of the first epoch and some of the second."""
    chosen = {"rows_per_step": 1, "num_steps": 16, "save_every": 5, "keep_checkpoints": 9, "stall_timeout_s": 60}
    there = small_settings(target.parent, output, **{**chosen, **changed}).model_dump()
    return TrainSettings(**{**there, "input": str(samples), "target": str(target)})


def producer(target: Path, place: Path | str) -> Producer:
    """Makes the set for the target, a part at a time."""
    return Producer(place, SAMPLES, open_chat(target).tokenizer_hash, NUM_PARTS)


def run_on_the_finished_set(target: Path, place: Path) -> Path:
    """What any other run must end in: its folder; the set lies in `samples` beside it."""
    producer(target, place / "samples").finish()
    run(stream_settings(target, place / "samples", place / "run"))
    return place / "run"


def weights(output: Path) -> dict[str, bytes]:
    """Weights and moments of every checkpoint of a run."""
    found = output.glob("checkpoints/*/*.safetensors")
    return {str(path.relative_to(output)): path.read_bytes() for path in found}


def steps_in(output: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    return sorted(int(path.name[-8:]) for path in (output / "checkpoints").iterdir())


def first_step_of(settings: TrainSettings, part: int) -> int:
    """How many steps are made before one reads from a part, which must be there."""
    data = read_data(settings, open_input(settings), Path(settings.target))
    return next(step for step in range(settings.num_steps or 0) if data.rows.parts_reached(step + 1) == part + 1)
