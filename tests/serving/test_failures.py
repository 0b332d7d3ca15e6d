"""What is tried again and what is not, and how long a server is left alone that asks for it."""

import time
from email.utils import formatdate

import pytest

from draftmill.serving.failures import (
    LONGEST_RETRY_AFTER_S,
    AttemptsExhaustedError,
    Backoff,
    RequestRefusedError,
    Setback,
    refusal,
    retry_after_s,
)


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 529])
def test_these_are_tried_again(status: int) -> None:
    found = refusal(status, {"Retry-After": "3"}, b'{"error": {"message": "busy"}}')
    assert isinstance(found, Setback)
    assert (found.kind, str(found), found.retry_after_s) == (f"HTTP {status}", f"HTTP {status}: busy", 3.0)


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 405, 413, 422, 451])
def test_these_never_are(status: int) -> None:
    found = refusal(status, {}, b'{"object": "error", "message": "window exceeded", "code": 400}')
    assert isinstance(found, RequestRefusedError)
    assert (found.status, str(found)) == (status, f"refused with HTTP {status}: window exceeded")
    assert found.is_of_the_endpoint == (status in (401, 403, 404, 405))


def test_retry_after_is_read_as_seconds_and_as_a_date() -> None:
    now_s = time.time()
    assert retry_after_s("2.5", now_s) == 2.5
    assert retry_after_s(formatdate(now_s + 30, usegmt=True), now_s) == pytest.approx(30, abs=1)
    assert retry_after_s(formatdate(now_s - 30, usegmt=True), now_s) == 0.0
    assert retry_after_s("86400", now_s) == LONGEST_RETRY_AFTER_S
    beyond = "Mon, 01 Jan 2024 00:00:00 +99999999999999999999"
    for unreadable in (None, "", "soon", "nan", "inf", beyond):
        assert retry_after_s(unreadable, now_s) is None


def test_waits_double_to_the_longest_and_are_jittered() -> None:
    backoff = Backoff(1.0, 30.0)
    for num_failures, whole in ((1, 1.0), (2, 2.0), (5, 16.0), (6, 30.0), (5000, 30.0)):
        waits = {backoff.delay_s(num_failures) for _ in range(50)}
        assert len(waits) > 1 and whole / 2 <= min(waits) and max(waits) <= whole


def test_an_exhausted_request_says_what_it_went_through() -> None:
    error = AttemptsExhaustedError({"HTTP 503": 2, "timeout": 1}, "http://a/v1: timeout")
    assert str(error) == "given up after 3 attempts (HTTP 503 2 x, timeout 1 x); the last: http://a/v1: timeout"
