"""What follows a step: progress, its line in `metrics.jsonl`, and where due, held-out figures and a checkpoint."""

from dataclasses import dataclass

from draftmill.progress import Progress
from draftmill.storage.store import Store
from draftmill.train.held_out import HeldOut
from draftmill.train.keep import Checkpoints
from draftmill.train.metrics import MetricsLog, StepSums, peak_memory_bytes
from draftmill.train.state import RunState


@dataclass
class Logbook:
    """Everything that follows a step, in order: figures first, so that a checkpoint never stands without its line."""

    run: RunState
    checkpoints: Checkpoints
    metrics: MetricsLog
    progress: Progress
    held_out: HeldOut | None
    """What acceptance is measured on; None: it is not."""

    def after_step(self, sums: StepSums, epoch: int, lr: float, grad_norm: float) -> None:
        """Tells of the step that was just made."""
        step = self.run.position.step
        self.progress.advance(1, sums.note)
        record = sums.record(step=step, epoch=epoch, lr=lr, grad_norm=grad_norm)
        record["time_left_s"] = self.progress.left_s()
        record["peak_memory_bytes"] = peak_memory_bytes(self.run.drafter.fc.weight.device)
        if self.held_out is not None and self.held_out.is_due(step, self.checkpoints.num_steps):
            record |= self.held_out.measure(self.run.published)
        self.metrics.append(record)
        if self.checkpoints.is_due(step):
            self.metrics.publish()
            self.checkpoints.save(self.run)


def open_logbook(
    run: RunState, checkpoints: Checkpoints, stores: tuple[Store, ...], held_out: HeldOut | None
) -> Logbook:
    """The logbook of a run, taken up where the run stands."""
    done = run.position.step
    progress = Progress("train", checkpoints.num_steps, "steps", done=done)
    return Logbook(run, checkpoints, MetricsLog(stores, done), progress, held_out)
