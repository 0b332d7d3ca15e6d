"""Held-out figures in placement split: rank 0 has the weights, the first target rank what measuring them needs.

At a step that is due rank 0 gives its weights away, in the target's dtype, and waits for their figures. The first
target rank knows the same steps: before it reads the rows of the next one it waits for the weights. All other ranks
go on until they need one of the two.

Until then no drafter rank asks for rows that come after the weights are given: NCCL receives on a kernel that is at
work until somebody sends, and whatever waits for a whole device (an allocator that gives memory back, for one) would
wait for it, while the target waits for the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from draftmill.model.checkpoint import copy_of
from draftmill.model.drafter import Drafter
from draftmill.train.held_out import HeldOut, is_due, next_due
from draftmill.train.ranks import Ranks

_WEIGHTS, _FIGURES = "a drafter to be measured", "what a drafter is measured at"


class Standing(NamedTuple):
    """Where a run goes on, as rank 0 tells all others."""

    step: int
    measured: int
    """Steps up to which all that was due is measured: these, or one less where the last measurement was cut off."""


@dataclass(frozen=True)
class Asking:
    """Rank 0's side."""

    ranks: Ranks
    dtype: torch.dtype
    """The target's, in which the drafter is measured."""

    def measure(self, drafter: Drafter) -> dict[str, Any]:
        """The figures of these weights, as they join the step's line."""
        target = self.ranks.layout.first_target
        self.ranks.give(target, copy_of(drafter, self.dtype, torch.device("cpu")), _WEIGHTS)
        return self.ranks.take(target, _FIGURES)


@dataclass
class Asked:
    """The first target rank's side."""

    ranks: Ranks
    held_out: HeldOut
    every: int
    num_steps: int
    measured: int
    """Steps up to which all that was due is measured, as `Standing` tells at the start."""

    def until(self, step: int) -> None:
        """Measures what is due when `step` steps are done, or was before."""
        for at in range(self.measured + 1, step + 1):
            if is_due(self.every, at, self.num_steps):
                self.ranks.give(0, self.held_out.measure_given(self.ranks.take(0, _WEIGHTS)), _FIGURES)
        self.measured = max(self.measured, step)


def until_next_due(
    is_known: Callable[[int], bool], done: Callable[[], int], every: int | None, num_steps: int
) -> Callable[[int], bool]:
    """Which steps' rows may be asked for when `done` steps are: those known that need no weights measured before."""
    return lambda step: step < next_due(every, done(), num_steps) and is_known(step)
