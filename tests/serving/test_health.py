"""An endpoint is set aside when its answers say so, for waits that grow, and is up again after a trial."""

import pytest

from draftmill.serving import failures
from draftmill.serving.failures import Backoff, Setback
from draftmill.serving.health import Health
from serving.fleets import limits


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(limits(max_in_flight=64, backoff=Backoff(1.0, 1000.0)), clock)


def fail(health: Health, clock: Clock, kind: str, retry_after_s: float | None = None) -> None:
    """One failure of something sent now, known a second later."""
    sent_s = clock.now_s
    clock.now_s += 1.0
    health.failed(Setback(kind, "", retry_after_s), sent_s)


def test_one_lost_connection_halves_and_no_more(health: Health, clock: Clock) -> None:
    fail(health, clock, failures.CONNECTION)
    assert (health.is_up, health.failures_in_row, health.concurrency.limit) == (True, 1, 16)


def test_what_was_lost_at_once_counts_once(health: Health, clock: Clock) -> None:
    clock.now_s = 200.0
    for sent_s in (150.0, 160.0, 199.0):
        health.failed(Setback(failures.CONNECTION, ""), sent_s)
    assert (health.is_up, health.failures_in_row, health.concurrency.limit) == (True, 1, 16)


@pytest.mark.parametrize(
    ("kind", "retry_after_s"), [(failures.CONNECT, None), ("HTTP 429", 7.0), (failures.TIMEOUT, None)]
)
def test_these_set_it_aside_at_once(health: Health, clock: Clock, kind: str, retry_after_s: float | None) -> None:
    fail(health, clock, kind, retry_after_s)
    assert not health.is_up and health.has_fallen.is_set()
    if retry_after_s:
        assert health.trial_due_s == clock.now_s + 7.0
    else:
        assert clock.now_s < health.trial_due_s <= clock.now_s + 1.0


def test_a_timeout_beside_answers_does_not_set_it_aside(health: Health, clock: Clock) -> None:
    clock.now_s = 150.0
    health.answered(120.0, 100, was_full=True)
    clock.now_s = 200.0
    health.failed(Setback(failures.TIMEOUT, ""), 160.0)
    assert not health.is_up, "nothing was answered since"
    health.passed_trial()
    clock.now_s = 250.0
    health.answered(210.0, 100, was_full=True)
    clock.now_s = 300.0
    health.failed(Setback(failures.TIMEOUT, ""), 220.0)
    assert health.is_up


def test_a_retry_after_is_honoured_among_failures_that_count_once(health: Health, clock: Clock) -> None:
    clock.now_s = 200.0
    health.failed(Setback("HTTP 429", "", 1.0), 150.0)
    clock.now_s = 200.5
    health.failed(Setback("HTTP 429", "", 9.0), 150.0)
    health.failed(Setback("HTTP 429", "", 2.0), 150.0)
    assert (health.failures_in_row, health.trial_due_s) == (1, 209.5)


def test_three_in_a_row_set_it_aside_and_an_answer_ends_the_row(health: Health, clock: Clock) -> None:
    fail(health, clock, "HTTP 500")
    fail(health, clock, "HTTP 500")
    health.answered(clock.now_s, 100, was_full=True)
    fail(health, clock, "HTTP 500")
    fail(health, clock, "HTTP 500")
    assert health.is_up
    fail(health, clock, "HTTP 500")
    assert not health.is_up


def test_trials_that_fail_are_made_after_growing_waits(health: Health, clock: Clock) -> None:
    waits_s = []
    for _ in range(6):
        fail(health, clock, failures.CONNECT)
        waits_s.append(health.trial_due_s - clock.now_s)
        clock.now_s = health.trial_due_s
    assert all(whole / 2 <= wait_s <= whole for wait_s, whole in zip(waits_s, (1, 2, 4, 8, 16, 32), strict=True))
    assert health.failures_in_row == 6
    assert health.concurrency.limit == 16, "trials do not lower it further"
    health.passed_trial()
    assert (health.is_up, health.has_fallen.is_set(), health.concurrency.limit) == (True, False, 32)
    fail(health, clock, failures.CONNECT)
    assert health.failures_in_row == 7, "a trial is no answer to a request"


def test_an_overloaded_engine_keeps_its_lower_level(health: Health, clock: Clock) -> None:
    fail(health, clock, "HTTP 429", 1.0)
    health.passed_trial()
    assert health.concurrency.limit == 16
