"""The learning rate: a function of the step alone, so that a resumed run needs no state of it."""

import math

from draftmill.settings.train import TrainSettings


def lr_at(step: int, num_steps: int, settings: TrainSettings) -> float:
    """The learning rate of step `step`, counted from 0, in a run of `num_steps`."""
    warmup = math.ceil(settings.warmup_frac * num_steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    left = 1 - (step - warmup) / max(num_steps - warmup, 1)  # 1 after the warm-up, towards 0 at the end
    if settings.schedule == "cosine":
        height = 0.5 * (1 - math.cos(math.pi * left))
    else:
        falling = settings.decay_frac * num_steps / max(num_steps - warmup, 1)
        height = min(1.0, left / falling)
    return settings.lr * (settings.final_lr_frac + (1 - settings.final_lr_frac) * height)
