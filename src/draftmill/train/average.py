"""The exponential moving average of a drafter's weights (EMA): what a run with `ema_decay` publishes.

    average <- d * average + (1 - d) * weights,      d = min(ema_decay, (1 + n) / (10 + n)) after the n-th update

A decay that rises forgets the first weights soon (with 0.999 from the start, half of them would still be there after
700 updates); it follows from the number of updates alone, so that a resumed run goes on as if it had never stopped.
The rule of the rise is that of TensorFlow's ExponentialMovingAverage with num_updates.
"""

import torch

from draftmill.model.checkpoint import copy_of
from draftmill.model.drafter import Drafter


class Average:
    """A second drafter, float32, that follows the trained one."""

    def __init__(self, drafter: Drafter, decay: float) -> None:
        self.drafter = copy_of(drafter, torch.float32)
        self._decay = decay

    @torch.no_grad()
    def follow(self, drafter: Drafter, num_updates: int) -> None:
        """Takes in the weights that `num_updates` updates have led to."""
        decay = min(self._decay, (1 + num_updates) / (10 + num_updates))
        for mean, weight in zip(self.drafter.parameters(), drafter.parameters(), strict=True):
            mean.lerp_(weight, 1 - decay)
