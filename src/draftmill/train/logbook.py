"""What follows a step: progress, its line in `metrics.jsonl`, and where due, held-out figures and a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from draftmill.progress import Progress
from draftmill.settings.train import TrainSettings
from draftmill.train.held_out import Gauge
from draftmill.train.keep import Checkpoints
from draftmill.train.loop import refuse_unsound
from draftmill.train.metrics import MetricsLog, StepSums, peak_memory_bytes
from draftmill.train.state import RunState
from draftmill.train.trackers import Tracked, Tracker, figures_of, tracking


@dataclass
class Logbook:
    """Everything that follows a step, in order: figures first, so that a checkpoint never stands without its line."""

    run: RunState
    checkpoints: Checkpoints
    metrics: MetricsLog
    progress: Progress
    held_out: Gauge | None
    """Who measures acceptance on held-out prompts; None: nobody."""
    trackers: tuple[Tracker, ...]

    def after_step(self, sums: StepSums, epoch: int, lr: float, grad_norm: float) -> None:
        """Tells of the step that was just made."""
        step = self.run.position.step
        if self.checkpoints.is_due(step):
            refuse_unsound(self.run, self.checkpoints.num_steps)
        self.progress.advance(1, sums.note)
        record = sums.record(step=step, epoch=epoch, lr=lr, grad_norm=grad_norm)
        record["time_left_s"] = self.progress.left_s()
        record["peak_memory_bytes"] = peak_memory_bytes(self.run.drafter.fc.weight.device)
        try:
            if self.held_out is not None and self.held_out.is_due(step, self.checkpoints.num_steps):
                record |= self.held_out.measure(self.run.published)
        finally:  # a run that ends while it is measured stands at this step
            self.metrics.append(record)
        for tracker in self.trackers:
            tracker.log(step, figures_of(record))
        self.checkpoints.behind.check()
        if self.checkpoints.is_due(step):
            self.checkpoints.save(self.run, self.metrics.whole)


@contextmanager
def open_logbook(
    run: RunState, checkpoints: Checkpoints, held_out: Gauge | None, settings: TrainSettings
) -> Iterator[Logbook]:
    """The logbook of a run, taken up where the run stands; its trackers are closed in the end."""
    done = run.position.step
    metrics = MetricsLog(checkpoints.stores, done)
    progress = Progress("train", checkpoints.num_steps, "steps", done=done)
    tracked = Tracked.of(settings, checkpoints.stores, checkpoints.plan)
    with tracking(settings.trackers, tracked, metrics.records()) as trackers:
        yield Logbook(run, checkpoints, metrics, progress, held_out, trackers)
