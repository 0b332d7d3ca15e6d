"""A run as it stands: drafter, optimizer, position; saved whole after any step and restored bit for bit."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from draftmill.contracts.cards import canonical_json
from draftmill.contracts.errors import InputError
from draftmill.model.checkpoint import drafter_files, named_tensors, take_tensors
from draftmill.model.drafter import Drafter
from draftmill.settings.train import TrainSettings
from draftmill.storage.checkpoints import MASTERS_FILE, OPTIMIZER_FILE, POSITION_FILE, WEIGHTS_FILE
from draftmill.train.average import Average
from draftmill.train.optimizer import Optimizer


class Position(msgspec.Struct, kw_only=True):
    """How far a run has come; everything else about order, anchors and learning rate follows from `step`."""

    step: int
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
        """Back to where the checkpoint was written; InputError, and nothing changed, where it is not of this drafter
        or its files do not belong together.
        """
        position = position_of(files)
        published, moments = _tensors(files, WEIGHTS_FILE), _tensors(files, OPTIMIZER_FILE)
        masters = None if self.average is None else _tensors(files, MASTERS_FILE)
        wanted = _sizes(named_tensors(self.drafter))
        _refuse_others(WEIGHTS_FILE, _sizes(published), wanted)
        _refuse_others(MASTERS_FILE, wanted if masters is None else _sizes(masters), wanted)
        _refuse_others(OPTIMIZER_FILE, _sizes(moments), self.optimizer.sizes(position.num_updates))
        take_tensors(self.published, published)
        if masters is not None:
            take_tensors(self.drafter, masters)
        self.position = position
        self.optimizer.restore(moments, position.num_updates)


def position_of(files: dict[str, bytes]) -> Position:
    """How far the run had come that wrote a checkpoint; InputError where its files do not say."""
    try:
        return msgspec.json.decode(files[POSITION_FILE], type=Position)
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{POSITION_FILE} is missing or says no position ({error})") from error


def _tensors(files: dict[str, bytes], name: str) -> dict[str, Tensor]:
    try:
        return load(files[name])
    except (KeyError, SafetensorError) as error:
        raise InputError(f"{name} is missing or holds no tensors ({error})") from error


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _refuse_others(file: str, found: dict[str, torch.Size], wanted: dict[str, torch.Size]) -> None:
    if wrong := sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)):
        raise InputError(f"{file} does not fit the run: {', '.join(wrong[:5])} missing, foreign or of another shape")


def new_run(drafter: Drafter, settings: TrainSettings) -> RunState:
    """A run before its first step: float32 master weights, moments of zero, the average where the weights are."""
    average = None if settings.ema_decay is None else Average(drafter, settings.ema_decay)
    return RunState(drafter, Optimizer(drafter, settings), Position(step=0), average)
