"""Waiting for what somebody else is making, or for a slow store: told at growing intervals, and not for ever."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from draftmill.contracts.errors import DraftmillError, StorageError
from draftmill.progress import duration

T = TypeVar("T")

log = logging.getLogger(__name__)

_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.1, 5.0
_FIRST_TOLD_S, _LONGEST_TOLD_S = 10.0, 600.0
_HEED_EVERY_S = 0.5


class StalledError(StorageError):
    """What was awaited did not come, and nothing else did meanwhile."""


def nothing() -> None:
    """Where nobody wants to be called."""


@dataclass
class Waiting:
    """Waits until something is there; StalledError where `limit_s` seconds bring no sign of life."""

    limit_s: float
    heed: Callable[[], None] = nothing
    """Called between two looks: raises where the run is to stop."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def until(self, look: Callable[[], T | None], what: str, life: Callable[[], str]) -> T:
        """What `look` finds at last. `life` says how far the maker is: while it changes, the maker is at work."""
        if (found := look()) is not None:
            return found
        start = grew = self.clock()
        sign, told, pause_s = life(), start + _FIRST_TOLD_S, _FIRST_LOOK_S
        while (found := look()) is None:
            self.heed()
            now = self.clock()
            if now >= told or now - grew >= self.limit_s:
                grew, sign = (grew, sign) if (seen := life()) == sign else (now, seen)
                self._tell(what, sign, now - start, now - grew)
                told = now + min(now - start, _LONGEST_TOLD_S)
            self.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_LOOK_S)
        return found

    def _tell(self, what: str, sign: str, waited_s: float, silent_s: float) -> None:
        if silent_s >= self.limit_s:
            raise StalledError(
                f"{what} is awaited since {duration(waited_s)}, and nothing has come for {duration(silent_s)} "
                f"(--stall-timeout-s {self.limit_s:g}); {sign}. Look after what makes it, and run the same command "
                "again to go on"
            )
        log.warning("%s is awaited since %s; %s", what, duration(waited_s), sign)


class Errand(Generic[T]):
    """One job on a thread of its own, which a process that ends does not wait for."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._found: list[T] = []
        self._failure: DraftmillError | None = None
        # A thread lets go of its arguments when it ends, and a job may hold gigabytes.
        self._thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether its result, or its failure, is there."""
        return not self._thread.is_alive()

    def result(self, heed: Callable[[], None] = nothing) -> T:
        """What the job gives or raises; `heed` is called now and then until it does."""
        while self._thread.is_alive():
            self._thread.join(_HEED_EVERY_S)
            heed()
        if self._failure is not None:
            raise self._failure
        assert self._found, "the errand has met a fault of ours, whose traceback stands above"
        return self._found[0]

    def _run(self, job: Callable[[], T]) -> None:
        try:
            self._found.append(job())
        except DraftmillError as error:
            self._failure = error
