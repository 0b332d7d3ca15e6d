"""What is told when a step is done: progress, its line in `metrics.jsonl`, and where one is due a checkpoint."""

from dataclasses import dataclass

from draftmill.progress import Progress
from draftmill.storage.store import Store
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

    def after_step(self, sums: StepSums, epoch: int, lr: float, grad_norm: float) -> None:
        """Tells of the step that was just made."""
        step = self.run.position.step
        self.progress.advance(1, sums.note)
        record = sums.record(step=step, epoch=epoch, lr=lr, grad_norm=grad_norm)
        record["time_left_s"] = self.progress.left_s()
        record["peak_memory_bytes"] = peak_memory_bytes(self.run.drafter.fc.weight.device)
        self.metrics.append(record)
        if self.checkpoints.is_due(step):
            self.metrics.publish()
            self.checkpoints.save(self.run)


def open_logbook(run: RunState, checkpoints: Checkpoints, stores: tuple[Store, ...]) -> Logbook:
    """The logbook of a run, taken up where the run stands."""
    done = run.position.step
    progress = Progress("train", checkpoints.num_steps, "steps", done=done)
    return Logbook(run, checkpoints, MetricsLog(stores, done), progress)
