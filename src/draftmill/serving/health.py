"""Whether an endpoint may be given requests, how many, and for how long: judged by what it answers alone.

It is up until it refuses connections, sends a Retry-After, lets a request time out without having answered any other
meanwhile, or fails three times in a row. Then it is set aside, for waits that grow, until a trial has passed.
"""

import asyncio
from collections.abc import Callable

from draftmill.serving import failures
from draftmill.serving.concurrency import Concurrency
from draftmill.serving.failures import Setback
from draftmill.serving.limits import FleetLimits
from draftmill.serving.patience import Patience

FAILURES_TO_SET_ASIDE = 3
_OF_DEATH = (failures.CONNECT, failures.CONNECTION, failures.TIMEOUT)
"""An engine that comes back from one of these is a new one; one that said it was overloaded is the same as before."""


class Health:
    """The health of one endpoint. `clock` gives seconds; all times are its."""

    def __init__(self, limits: FleetLimits, clock: Callable[[], float]) -> None:
        self.concurrency = Concurrency(limits.max_in_flight)
        self.patience = Patience(limits.min_timeout_s, limits.min_rate_tok_per_s)
        self.is_up = True
        self.has_fallen = asyncio.Event()
        """Set while it is not up, for whoever makes the trials."""
        self.trial_due_s = 0.0
        self.failures_in_row = 0
        self.last_failure: Setback | None = None
        self._backoff = limits.backoff
        self._clock = clock
        self._failed_s = self._answered_s = float("-inf")

    def answered(self, sent_s: float, num_tokens: int, *, was_full: bool) -> None:
        """Notes the answer to what was sent at `sent_s`; `was_full`: no place was left beside it."""
        self._answered_s = self._clock()
        self.failures_in_row = 0
        token_s = self.patience.observed(self._answered_s - sent_s, num_tokens)
        self.concurrency.answered(sent_s, self._answered_s, token_s, was_full=was_full)

    def failed(self, setback: Setback, sent_s: float) -> None:
        """Notes the failure of what was sent at `sent_s`, a request or a trial.

        What was sent before the last noted failure is part of the same event: 256 requests lost at once are one. A
        Retry-After is honoured all the same.
        """
        is_new = sent_s >= self._failed_s
        if is_new:
            self._failed_s = self._clock()
            self.failures_in_row += 1
            self.last_failure = setback
            if self.is_up:
                self.concurrency.failed(self._failed_s)
        if setback.retry_after_s is not None:
            self._set_aside(setback.retry_after_s)
        elif is_new and (not self.is_up or self._should_rest(setback, sent_s)):
            self._set_aside(self._backoff.delay_s(self.failures_in_row))

    def passed_trial(self) -> None:
        """The model answers again: it is up."""
        if self.last_failure and self.last_failure.kind in _OF_DEATH:
            self.concurrency.restart(self._clock())
        self.is_up = True
        self.has_fallen.clear()

    def _should_rest(self, setback: Setback, sent_s: float) -> bool:
        return (
            setback.kind == failures.CONNECT
            or (setback.kind == failures.TIMEOUT and self._answered_s < sent_s)
            or self.failures_in_row >= FAILURES_TO_SET_ASIDE
        )

    def _set_aside(self, wait_s: float) -> None:
        self.trial_due_s = max(self.trial_due_s, self._clock() + wait_s)
        self.is_up = False
        self.has_fallen.set()
