"""A tracker shows every step of a run once, however often the run was stopped; one that is missing is named."""

import math
import sqlite3
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from draftmill.contracts.errors import RecipeError  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.storage.store import open_store  # noqa: E402
from draftmill.train.trackers import Tracked, Tracker, check_trackers, figures_of, tracking  # noqa: E402

pytestmark = pytest.mark.torch


def tracked(folder: Path | None) -> Tracked:
    return Tracked(folder, "tests", "run-0123456789ab", {"lr": 0.1})


def records(*steps: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 1 / step, "slot_accuracy": [0.5, None], "epoch": 0} for step in steps]


def tell(trackers: tuple[Tracker, ...], *steps: int) -> None:
    for record in records(*steps):
        for tracker in trackers:
            tracker.log(record["step"], figures_of(record))


def test_figures_are_flat_finite_numbers() -> None:
    record = {"step": 3, "loss": 0.5, "lr": 1, "tau": None, "grad_norm": math.inf, "slot_accuracy": [0.5, None, 0.25]}
    record["grow"] = "target"  # words stay in metrics.jsonl
    assert figures_of(record) == {"loss": 0.5, "lr": 1.0, "slot_accuracy/1": 0.5, "slot_accuracy/3": 0.25}


def test_a_run_is_known_by_its_place_and_plan_alone(tmp_path: Path) -> None:
    stores = (open_store(str(tmp_path / "run"), create=True),)
    chosen = TrainSettings(input="i", output=(str(tmp_path / "run"),), target="t")
    one, same, other = (Tracked.of(chosen, stores, plan) for plan in ("a" * 64, "a" * 64, "b" * 64))
    assert one.run_id == same.run_id == "run-aaaaaaaaaaaa" and other.run_id != one.run_id
    assert (one.folder, one.project) == (tmp_path / "run", "draftmill")


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_has_every_step_once_after_a_kill(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tracking(["tensorboard"], tracked(tmp_path), []) as trackers:
        tell(trackers, 1, 2, 3, 4)
    with tracking(["tensorboard"], tracked(tmp_path), records(1, 2)) as trackers:  # its last checkpoint was at 2
        tell(trackers, 3, 4, 5)
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    losses = shown.Scalars("loss")
    assert [event.step for event in losses] == [1, 2, 3, 4, 5]
    assert [event.value for event in losses] == pytest.approx([1 / step for step in range(1, 6)])
    assert set(shown.Tags()["scalars"]) == {"loss", "epoch", "slot_accuracy/1"}


@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_has_every_step_once_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read when trackio is imported, which nothing else here does
    with tracking(["trackio"], tracked(tmp_path), []) as trackers:
        tell(trackers, 1, 2, 3, 4)
    with tracking(["trackio"], tracked(tmp_path), records(1, 2)) as trackers:
        tell(trackers, 3, 4, 5)
    with sqlite3.connect(tmp_path / "tests.db") as database:
        assert [step for (step,) in database.execute("select step from metrics order by step")] == [1, 2, 3, 4, 5]


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_the_newest_offline_folder_of_wandb_holds_every_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with tracking(["wandb"], tracked(tmp_path), []) as trackers:
        tell(trackers, 1, 2, 3, 4)
    with tracking(["wandb"], tracked(tmp_path), records(1, 2)) as trackers:
        tell(trackers, 3, 4, 5)
        tell(trackers, 5)  # it has that step
    newest = max((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    assert wandb_steps(newest) == [1, 2, 3, 4, 5]


def wandb_steps(file: Path) -> list[int]:
    """The steps of the history in a short file of W&B's: after a header, records as LevelDB's log has them."""
    from wandb.proto import wandb_internal_pb2

    data, at, steps = file.read_bytes(), 7, []
    while at < len(data):
        _checksum, length, kind = struct.unpack("<IHB", data[at : at + 7])
        assert kind == 1, "a record that is whole"
        record = wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + length])
        steps += [record.history.step.num] if record.WhichOneof("record_type") == "history" else []
        at += 7 + length
    return steps


def test_tensorboard_wants_a_local_folder() -> None:
    with pytest.raises(RecipeError, match="local --output"), tracking(["tensorboard"], tracked(None), []):
        pass


def test_a_tracker_that_is_not_installed_is_named_with_its_cure() -> None:
    check_trackers(())
    check_trackers(["json"])
    with pytest.raises(RecipeError, match="a_tracker, which is not installed: pip install a_tracker"):
        check_trackers(["a_tracker"])
