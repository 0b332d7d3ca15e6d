"""A run that ends while it is measured stands at its step with that step's line, which its rerun completes."""

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
from draftmill.train.logbook import Kept, make_up, open_logbook  # noqa: E402
from draftmill.train.metrics import StepSums  # noqa: E402
from draftmill.train.ranks import RankLostError  # noqa: E402
from draftmill.train.state import RunState, new_run  # noqa: E402
from tiny_drafter import random_drafter, tiny_shape  # noqa: E402
from tiny_families import tiny_model  # noqa: E402

pytestmark = pytest.mark.torch

EVERY, NUM_STEPS = 2, 5
FIGURES = {"tau": 1.5, "tau_micro": 1.25, "tau_walked": None, "tau_walked_micro": None, "eval_s": 0.5}
CHOSEN: dict[str, object] = {"save_every": 1, "eval_every": EVERY, "eval_input": ("e",)}
SETTINGS = TrainSettings(input="in", output=("out",), target="t", **CHOSEN)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run() -> RunState:
    return new_run(random_drafter(tiny_shape(freeze(tiny_model("llama")))), SETTINGS)


def kept_at(step: int, run: RunState, folder: Path) -> Kept:
    run.position.step = step
    store = open_store(str(folder), create=True)
    return Kept.of(run, Checkpoints((store,), "plan", NUM_STEPS, save_every=1, keep=1, patiently=Patiently(0)))


def lose_a_rank(drafter: Drafter) -> dict[str, Any]:
    raise RankLostError("it was killed")


def measure(drafter: Drafter) -> dict[str, Any]:
    return dict(FIGURES)


def lines_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run_until_lost(kept: Kept) -> None:
    """Steps to the first that is due, where the rank that measures is gone."""
    with open_logbook(kept, lose_a_rank, SETTINGS) as logbook:
        for step in range(1, EVERY + 1):
            kept.run.position.step = step
            if step == EVERY:
                with pytest.raises(RankLostError):
                    logbook.after_step(StepSums.empty(3), 0, 1e-3, 0.5)
            else:
                logbook.after_step(StepSums.empty(3), 0, 1e-3, 0.5)
    kept.checkpoints.behind.settle()
    kept.checkpoints.leave(kept.run, kept.metrics.whole)


def test_a_step_whose_measurement_is_cut_off_has_its_line(run: RunState, tmp_path: Path) -> None:
    run_until_lost(kept_at(0, run, tmp_path))
    lines = lines_in(tmp_path)
    assert [line["step"] for line in lines] == [1, 2] and all("tau" not in line for line in lines)


def test_what_was_cut_off_is_made_up_for_once(run: RunState, tmp_path: Path) -> None:
    run_until_lost(kept_at(0, run, tmp_path))
    before, again = lines_in(tmp_path), kept_at(0, run, tmp_path)
    assert (again.run.position.step, again.measured(EVERY)) == (EVERY, EVERY - 1)
    make_up(again, measure, EVERY)
    assert lines_in(tmp_path) == again.metrics.records() == [before[0], before[1] | FIGURES]
    once_more = kept_at(0, run, tmp_path)
    assert once_more.measured(EVERY) == EVERY
    make_up(once_more, lose_a_rank, EVERY)  # nobody is asked


@pytest.mark.parametrize("step", [0, 1, EVERY])
def test_nothing_is_owed_where_nothing_was_due_or_nothing_is_logged(run: RunState, tmp_path: Path, step: int) -> None:
    kept = kept_at(step, run, tmp_path)
    if step == 1:
        kept.metrics.append({"step": 1, "loss": 1.0, "acceptance": 1.0, "slot1_accuracy": 0.0})
    assert kept.measured(EVERY) == kept.measured(None) == step
    make_up(kept, lose_a_rank, EVERY)


def test_a_step_that_waited_for_figures_says_nothing_of_who_waits_for_whom(run: RunState, tmp_path: Path) -> None:
    told = {}
    with open_logbook(kept_at(0, run, tmp_path), measure, SETTINGS) as logbook:
        for step in range(1, EVERY + 2):
            run.position.step = step
            sums = StepSums.empty(3)
            sums.target_ranks, sums.wall_s, sums.seconds["waiting"] = 1, 10.0, 9.0
            logbook.after_step(sums, 0, 1e-3, 0.5)
            told[step] = sums.note()
        logbook.checkpoints.behind.settle()
    grown = [line["grow"] for line in lines_in(tmp_path)]
    assert grown == ["target", "target", None]
    assert "waiting 90%" in told[EVERY] and "waiting" not in told[EVERY + 1] and "loss" in told[EVERY + 1]
