"""A run that ends while it is measured stands at its step with that step's line."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from draftmill.extract.target import freeze  # noqa: E402
from draftmill.model.drafter import Drafter  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.storage.patience import Patiently  # noqa: E402
from draftmill.storage.store import open_store  # noqa: E402
from draftmill.train.keep import Checkpoints  # noqa: E402
from draftmill.train.logbook import open_logbook  # noqa: E402
from draftmill.train.metrics import StepSums  # noqa: E402
from draftmill.train.ranks import RankLostError  # noqa: E402
from draftmill.train.state import new_run  # noqa: E402
from tiny_drafter import random_drafter, tiny_shape  # noqa: E402
from tiny_families import tiny_model  # noqa: E402

pytestmark = pytest.mark.torch


class Lost:
    """A rank that is asked to measure, and is gone."""

    def is_due(self, step: int, num_steps: int) -> bool:
        return step == 2

    def measure(self, drafter: Drafter) -> dict[str, Any]:
        raise RankLostError("it was killed")


def test_a_step_whose_measurement_is_cut_off_has_its_line(tmp_path: Path) -> None:
    settings = TrainSettings(input="in", output=("out",), target="t")
    run = new_run(random_drafter(tiny_shape(freeze(tiny_model("llama")))), settings)
    store = open_store(str(tmp_path / "out"), create=True)
    checkpoints = Checkpoints((store,), "plan", num_steps=4, save_every=4, keep=1, patiently=Patiently(0))
    with open_logbook(run, checkpoints, Lost(), settings) as logbook:
        run.position.step = 1
        logbook.after_step(StepSums.empty(3), 0, 1e-3, 0.5)
        run.position.step = 2
        with pytest.raises(RankLostError):
            logbook.after_step(StepSums.empty(3), 0, 1e-3, 0.5)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and all("tau" not in line for line in lines)
