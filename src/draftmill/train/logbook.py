"""What follows a step: progress, its line in `metrics.jsonl`, and where due, held-out figures and a checkpoint."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from draftmill.model.drafter import Drafter
from draftmill.progress import Progress
from draftmill.settings.train import TrainSettings
from draftmill.train.held_out import Gauge, is_due, tell
from draftmill.train.keep import Checkpoints
from draftmill.train.loop import refuse_unsound
from draftmill.train.metrics import MetricsLog, StepSums, peak_memory_bytes
from draftmill.train.state import RunState
from draftmill.train.trackers import Tracked, Tracker, figures_of, tracking

log = logging.getLogger(__name__)


@dataclass
class Kept:
    """A run as it stands, and what is kept of it."""

    run: RunState
    checkpoints: Checkpoints
    metrics: MetricsLog

    @staticmethod
    def of(run: RunState, checkpoints: Checkpoints) -> "Kept":
        """The run put where its newest checkpoint stands, or a new one."""
        checkpoints.start(run)
        return Kept(run, checkpoints, MetricsLog(checkpoints.stores, run.position.step))

    def measured(self, every: int | None) -> int:
        """Steps up to which all that was due is measured: these, or one less where the last measurement was cut off,
        by what ended the run."""
        step, last = self.run.position.step, self.metrics.last(1)
        is_owed = is_due(every, step, self.checkpoints.num_steps) and bool(last) and "tau" not in last[0]
        return step - 1 if is_owed and last[0]["step"] == step else step


@dataclass
class Logbook(Kept):
    """Everything that follows a step, in order: figures first, so that a checkpoint never stands without its line."""

    progress: Progress
    every: int | None
    """Steps between measurements on held-out prompts."""
    gauge: Gauge | None
    """Who measures then; None: nobody."""
    trackers: tuple[Tracker, ...]

    def after_step(self, sums: StepSums, epoch: int, lr: float, grad_norm: float) -> None:
        """Tells of the step that was just made."""
        step, num_steps = self.run.position.step, self.checkpoints.num_steps
        if self.checkpoints.is_due(step):
            refuse_unsound(self.run, num_steps)
        sums.follows_measuring = is_due(self.every, step - 1, num_steps)
        self.progress.advance(1, sums.note)
        record = sums.record(step=step, epoch=epoch, lr=lr, grad_norm=grad_norm)
        record["time_left_s"] = self.progress.left_s()
        record["peak_memory_bytes"] = peak_memory_bytes(self.run.drafter.fc.weight.device)
        try:
            if self.gauge is not None and is_due(self.every, step, num_steps):
                log.info("measuring step %s on held-out prompts", f"{step:,}")
                record |= _told(self.gauge, self.run.published)
        finally:  # a run that ends while it is measured stands at this step
            self.metrics.append(record)
        for tracker in self.trackers:
            tracker.log(step, figures_of(record))
        self.checkpoints.behind.check()
        if self.checkpoints.is_due(step):
            self.checkpoints.save(self.run, self.metrics.whole)


def _told(gauge: Gauge, drafter: Drafter) -> dict[str, Any]:
    """What is measured, said to people too."""
    figures = gauge(drafter)
    tell(figures, drafter.shape.block_size)
    return figures


def make_up(kept: Kept, gauge: Gauge | None, every: int | None) -> None:
    """Makes the measurement that was cut off where the run stands, and completes its line; before trackers are opened,
    which are told every line once."""
    if gauge is not None and kept.measured(every) < kept.run.position.step:
        log.info("measuring step %s, which has no held-out figures yet", f"{kept.run.position.step:,}")
        kept.metrics.complete(_told(gauge, kept.run.published))


@contextmanager
def open_logbook(kept: Kept, gauge: Gauge | None, settings: TrainSettings) -> Iterator[Logbook]:
    """The logbook of a run, taken up where the run stands; its trackers are closed in the end."""
    run, checkpoints, metrics = kept.run, kept.checkpoints, kept.metrics
    progress = Progress("train", checkpoints.num_steps, "steps", done=run.position.step)
    tracked = Tracked.of(settings, checkpoints.stores, checkpoints.plan)
    with tracking(settings.trackers, tracked, metrics.records()) as trackers:
        yield Logbook(run, checkpoints, metrics, progress, settings.eval_every, gauge, trackers)
