"""Figures for TensorBoard, Weights & Biases and Trackio, as `metrics.jsonl` has them, each step once.

`metrics.jsonl` is the truth: what a killed run has told beyond its last checkpoint is told again by the rerun. So a
tracker is told all steps so far when a run is taken up: TensorBoard and Trackio have forgotten the run before, W&B
knows it by its id and passes over steps that it has (offline, its newest folder holds them all). Nothing is imported
that is not named; credentials and modes are each tracker's own (`WANDB_MODE=offline`, for example).
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from draftmill.contracts.errors import RecipeError
from draftmill.settings.train import TrackerName, TrainSettings
from draftmill.storage.store import Store

TENSORBOARD_FOLDER = "tensorboard"
_EVENT_FILES = "events.out.tfevents.*"


@runtime_checkable
class Tracker(Protocol):
    """Somebody who draws figures over steps."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Takes the figures of a step."""
        ...

    def close(self) -> None:
        """Sends or writes what it holds still."""
        ...


@dataclass(frozen=True)
class Tracked:
    """What is tracked: where it lies, and under which names it is known."""

    folder: Path | None
    """A local folder of the run's; None where all its outputs are object stores."""
    project: str
    run_id: str
    """The same whenever the run is taken up, another's for other settings."""
    recipe: dict[str, Any]

    @staticmethod
    def of(settings: TrainSettings, stores: Sequence[Store], plan_hash: str) -> "Tracked":
        """The run that `settings` describe."""
        folders = [store.folder for store in stores if store.folder is not None]
        name = settings.output[0].rstrip("/").rpartition("/")[2] or "run"
        recipe = settings.model_dump(mode="json")
        return Tracked(folders[0] if folders else None, settings.tracker_project, f"{name}-{plan_hash[:12]}", recipe)


def check_trackers(names: Sequence[str]) -> None:
    """RecipeError where a tracker is named that is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise RecipeError(f"--trackers names {name}, which is not installed: pip install {name}, or leave it out")


@contextmanager
def tracking(
    names: Sequence[TrackerName], tracked: Tracked, records: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Tracker, ...]]:
    """The trackers of a run whose steps so far are `records`; closed in the end, however it comes."""
    with ExitStack() as stack:
        # Machines read stdout, where Trackio greets and takes leave.
        with redirect_stdout(sys.stderr):
            trackers = tuple(stack.enter_context(closing(_open(name, tracked, records))) for name in names)
        try:
            yield trackers
        finally:
            with redirect_stdout(sys.stderr):
                stack.close()


def figures_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step's line, flat: those of slots as `name/slot`, and none that is missing or not finite."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= {f"{name}/{slot}": v for slot, v in enumerate(value, 1)} if isinstance(value, list) else {name: value}
    del flat["step"]
    return {name: float(v) for name, v in flat.items() if isinstance(v, int | float) and math.isfinite(v)}


def _open(name: TrackerName, tracked: Tracked, records: Sequence[Mapping[str, Any]]) -> Tracker:
    tracker = _KINDS[name](tracked)
    for record in records:
        tracker.log(record["step"], figures_of(record))
    return tracker


class TensorBoardTracker:
    """Event files in the run's folder."""

    def __init__(self, tracked: Tracked) -> None:
        if tracked.folder is None:
            raise RecipeError("TensorBoard reads event files of a local folder: give a local --output as well")
        from torch.utils.tensorboard.writer import SummaryWriter

        folder = tracked.folder / TENSORBOARD_FOLDER
        for events in folder.glob(_EVENT_FILES):
            events.unlink()
        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases."""

    def __init__(self, tracked: Tracked) -> None:
        import wandb  # pyright: ignore[reportMissingImports]  (an extra)

        self._run = wandb.init(
            project=tracked.project,
            id=tracked.run_id,
            name=tracked.run_id,
            dir=tracked.folder,
            config=tracked.recipe,
            resume="allow",
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if step >= self._run.step:  # the steps before are there
            self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """A run in Trackio's local database."""

    def __init__(self, tracked: Tracked) -> None:
        import trackio  # pyright: ignore[reportMissingImports]  (an extra)

        _forget(trackio.Api(), tracked)
        self._run = trackio.init(
            project=tracked.project, name=tracked.run_id, config=tracked.recipe, resume="never", embed=False
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def _forget(api: Any, tracked: Tracked) -> None:
    """Removes what Trackio has of this run."""
    try:
        runs = list(api.runs(tracked.project))
    except ValueError:  # the project does not exist yet
        return
    for run in runs:
        if run.name == tracked.run_id:
            run.delete()


_KINDS: dict[TrackerName, Callable[[Tracked], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}
