"""Time as it is really spent: Python only asks a CUDA device for work, and goes on before it is done."""

import time
from collections.abc import Callable

import torch

Clock = Callable[[], float]
"""Seconds since some moment of the past."""


class Laps:
    """Time without gaps: each lap goes from the end of the one before to its own, the first one from the start."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()

    def lap_s(self) -> float:
        """Ends a lap; its seconds."""
        before, self._since = self._since, self._clock()
        return self._since - before


def wait_for(device: torch.device) -> None:
    """Waits until a device has done what it was asked for, so that a clock may be read.

    On CUDA the current stream's work alone: what is on its way to or from other ranks has streams of its own.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
