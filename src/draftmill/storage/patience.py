"""How long a store that fails is asked again. One `Patience` is shared by all transfers of a run.

A store that is gone for minutes is waited for, with a line that says so; a request that the store refuses is not
repeated, and neither is one object that fails again and again while the others come.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from draftmill.contracts.errors import StorageError
from draftmill.progress import duration
from draftmill.storage.failures import is_transient, why

MAX_ATTEMPTS = 40
"""Of one transfer among others, none of which got further than the one before."""
_FIRST_WAIT_S, _LONGEST_WAIT_S, _MAX_DOUBLINGS = 0.2, 10.0, 6
_TOLD_EVERY_S = 15.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Patience:
    """Waits between attempts, and gives up when nothing was answered for `limit_s` seconds."""

    def __init__(
        self, limit_s: float, clock: Callable[[], float] = time.monotonic, max_attempts: float = MAX_ATTEMPTS
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._max_attempts = max_attempts
        self._silent_since: float | None = None
        self._told = -math.inf

    def answered(self) -> None:
        """Some request was answered: the store is there."""
        if self._silent_since is not None and self._told > self._silent_since:
            logger.info("the store answers again")
        self._silent_since = None

    async def wait(self, place: str, error: Exception, attempt: int) -> None:
        """Sleeps before attempt number `attempt` + 1; StorageError where there is to be none."""
        await asyncio.sleep(self.pause_s(place, error, attempt))

    def pause_s(self, place: str, error: Exception, attempt: int) -> float:
        """Seconds to let pass before attempt number `attempt` + 1; StorageError where there is to be none."""
        if not is_transient(error):
            raise StorageError(f"{place}: {why(error)}") from error
        now = self._clock()
        self._silent_since = now if self._silent_since is None else self._silent_since
        silent_s = now - self._silent_since
        if silent_s >= self._limit_s or attempt >= self._max_attempts:
            raise StorageError(
                f"{place}: given up after {attempt} attempts, {duration(silent_s)} without an answer of the store: "
                f"{why(error)}. What is published stays: run the same command again to go on"
            ) from error
        if now - self._told > _TOLD_EVERY_S and attempt > 1:
            self._told = now
            left = duration(self._limit_s - silent_s)
            logger.warning("%s: %s; it is asked again, for up to %s more", place, why(error), left)
        longest = min(_FIRST_WAIT_S * 2 ** min(attempt, _MAX_DOUBLINGS), _LONGEST_WAIT_S)
        return longest * random.uniform(0.5, 1.0)


@dataclass(frozen=True)
class Patiently:
    """Does a job again while its store does not answer, for at most `limit_s` seconds.

    For threads that have nothing else to do; jobs are such that doing them twice does no harm.
    """

    limit_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, job: Callable[[], T], place: str) -> T:
        """What `job` gives; StorageError where another try cannot mend what failed, or the store stayed away."""
        # Nothing else is asked of the store meanwhile: its silence alone says when to give up.
        patience, attempt = Patience(self.limit_s, self.clock, math.inf), 0
        while True:
            try:
                given = job()
            except StorageError as error:
                if not isinstance(error.__cause__, Exception) or not is_transient(error.__cause__):
                    raise
                attempt += 1
                pause_s = patience.pause_s(place, error.__cause__, attempt)
            else:
                patience.answered()
                return given
            self.sleep(pause_s)
