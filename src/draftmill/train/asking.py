"""Held-out figures in placement split: rank 0 has the weights, the first target rank what measuring them needs.

At a step that is due rank 0 gives its weights away, in the target's dtype, and waits for their figures. The first
target rank knows the same steps: before it reads the rows of the next one it waits for the weights. All other ranks
go on until they need one of the two.
"""

from dataclasses import dataclass
from typing import Any

import torch

from draftmill.model.checkpoint import copy_of
from draftmill.model.drafter import Drafter
from draftmill.train.held_out import HeldOut, is_due, tell
from draftmill.train.ranks import Ranks

_WEIGHTS, _FIGURES = "a drafter to be measured", "what a drafter is measured at"


@dataclass(frozen=True)
class Asking:
    """Rank 0's side."""

    ranks: Ranks
    every: int
    dtype: torch.dtype
    """The target's, in which the drafter is measured."""

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether a run of `num_steps` is measured when `step` steps are done."""
        return is_due(self.every, step, num_steps)

    def measure(self, drafter: Drafter) -> dict[str, Any]:
        """The figures of these weights, as they join the step's line."""
        target = self.ranks.layout.first_target
        self.ranks.give(target, copy_of(drafter, self.dtype).cpu(), _WEIGHTS)
        figures = self.ranks.take(target, _FIGURES)
        tell(figures, drafter.shape.block_size)  # people see what rank 0 says
        return figures


@dataclass
class Asked:
    """The first target rank's side."""

    ranks: Ranks
    held_out: HeldOut
    num_steps: int
    done: int
    """Steps up to which all has been measured: at the start, those that the run goes on from."""

    def until(self, step: int) -> None:
        """Measures what is due when `step` steps are done, or was before."""
        for at in range(self.done + 1, step + 1):
            if self.held_out.is_due(at, self.num_steps):
                self.ranks.give(0, self.held_out.measure(self.ranks.take(0, _WEIGHTS)), _FIGURES)
        self.done = max(self.done, step)
