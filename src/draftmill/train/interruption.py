"""SIGTERM and Ctrl-C while a run learns: noted at once, followed between two steps, when weights and log agree."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StoppedError(KeyboardInterrupt):
    """The run was asked to stop, and stands between two steps."""


class Stop:
    """Whether somebody has asked the run to stop."""

    def __init__(self) -> None:
        self.is_asked = False

    def check(self) -> None:
        """StoppedError where it was asked."""
        if self.is_asked:
            raise StoppedError

    def then(self, after_step: Callable[..., None]) -> Callable[..., None]:
        """What follows a step, and the end where it was asked for."""

        def after_step_or_stop(*figures: object) -> None:
            after_step(*figures)
            self.check()

        return after_step_or_stop

    def _note(self, number: int, _frame: FrameType | None) -> None:
        # Who presses Ctrl-C again does not want to wait for the step. SIGTERM comes twice from launchers by themselves.
        if self.is_asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.is_asked = True


@contextmanager
def listening() -> Iterator[Stop]:
    """Within, both signals are only noted. Only a process's main thread is told of signals."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    # A shell has its background jobs ignore Ctrl-C.
    numbers = [signal.SIGTERM, *([signal.SIGINT] if callable(signal.getsignal(signal.SIGINT)) else [])]
    before = {number: signal.signal(number, stop._note) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
