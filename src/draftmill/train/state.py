"""A run as it stands: drafter, optimizer, position; saved whole after any step and restored bit for bit."""

from dataclasses import dataclass

import msgspec
from safetensors.torch import load, save

from draftmill.contracts.cards import canonical_json
from draftmill.model.checkpoint import drafter_files, take_tensors
from draftmill.model.drafter import Drafter
from draftmill.settings.train import TrainSettings
from draftmill.storage.checkpoints import MASTERS_FILE, OPTIMIZER_FILE, POSITION_FILE, WEIGHTS_FILE
from draftmill.train.average import Average
from draftmill.train.optimizer import Optimizer


class Position(msgspec.Struct, kw_only=True):
    """How far a run has come; everything else about order, anchors and learning rate follows from `step`."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    num_updates: int = 0
    """Steps in which the weights were moved."""
    num_bad: int = 0
    """Steps skipped for a loss or gradient that was not finite."""
    bad_in_a_row: int = 0
    poisoned: tuple[str, ...] = ()
    """Samples that nothing was learnt from, because their states were not finite, in the order they were met."""


@dataclass
class RunState:
    """What training changes."""

    drafter: Drafter
    optimizer: Optimizer
    position: Position
    average: Average | None = None
    """The average of the weights, where the run keeps one."""

    @property
    def published(self) -> Drafter:
        """The drafter that is evaluated and exported: the average where there is one."""
        return self.drafter if self.average is None else self.average.drafter

    def move(self, lr: float) -> None:
        """Moves the weights by their gradients, and counts it."""
        self.optimizer.step(lr)
        self.position.num_updates += 1
        self.position.bad_in_a_row = 0
        if self.average is not None:
            self.average.follow(self.drafter, self.position.num_updates)

    def files(self) -> dict[str, bytes]:
        """The files of a checkpoint, by name."""
        masters = {} if self.average is None else {MASTERS_FILE: drafter_files(self.drafter)[WEIGHTS_FILE]}
        return {
            **drafter_files(self.published),
            **masters,
            OPTIMIZER_FILE: save(self.optimizer.tensors(), metadata={"format": "pt"}),
            POSITION_FILE: canonical_json(self.position),
        }

    def restore(self, files: dict[str, bytes]) -> None:
        """Back to where the checkpoint was written."""
        take_tensors(self.published, load(files[WEIGHTS_FILE]))
        if self.average is not None:
            take_tensors(self.drafter, load(files[MASTERS_FILE]))
        self.position = msgspec.json.decode(files[POSITION_FILE], type=Position)
        self.optimizer.restore(load(files[OPTIMIZER_FILE]), self.position.num_updates)


def new_run(drafter: Drafter, settings: TrainSettings) -> RunState:
    """A run before its first step: float32 master weights, moments of zero, the average where the weights are."""
    average = None if settings.ema_decay is None else Average(drafter, settings.ema_decay)
    return RunState(drafter, Optimizer(drafter, settings), Position(), average)
