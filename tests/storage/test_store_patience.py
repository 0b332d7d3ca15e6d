"""A store is asked again while that may help and while anything of it is heard; then the failure says what to do."""

import asyncio
import logging
from collections.abc import Callable
from itertools import pairwise

import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError

from draftmill.contracts.errors import InputError, StorageError
from draftmill.storage.failures import is_transient
from draftmill.storage.patience import MAX_ATTEMPTS, Patience
from storage.far_store import Clock

SERVER = "Generic S3 error: Error performing PUT http://h/b/k in 2s - Server returned non-2xx status code: "


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GenericError(SERVER + "503 Service Unavailable: <Code>SlowDown</Code>"), True),
        (GenericError(SERVER + "500 Internal Server Error: "), True),
        (GenericError(SERVER + "429 Too Many Requests: "), True),
        (GenericError(SERVER + "408 Request Timeout: "), True),
        (GenericError(SERVER + "400 Bad Request: <Code>RequestTimeout</Code>"), True),
        (GenericError(SERVER + "400 Bad Request: <Code>IncompleteBody</Code>"), True),
        (GenericError(SERVER + "409 Conflict: <Code>OperationAborted</Code>"), True),
        (GenericError(SERVER + "400 Bad Request: <Code>InvalidRequest</Code>"), False),
        (GenericError(SERVER + "405 Method Not Allowed: "), False),
        (GenericError("Generic S3 error: HTTP error: error sending request"), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (PermissionDeniedError("403"), False),
        (AlreadyExistsError("there"), False),
        (FileNotFoundError("no such bucket"), False),
    ],
)
def test_it_is_known_what_may_pass(error: Exception, expected: bool):
    assert is_transient(error) is expected


def _wait(patience: Patience, attempt: int = 0) -> None:
    asyncio.run(patience.wait("s3://b/k", GenericError(SERVER + "503"), attempt))


def test_silence_ends_in_an_error_and_any_answer_ends_the_silence():
    clock = Clock()
    patience = Patience(100, clock)
    _wait(patience)
    clock.now = 90
    _wait(patience)
    patience.answered()
    clock.now = 150
    _wait(patience)
    clock.now = 260
    with pytest.raises(StorageError, match=r"s3://b/k: given up after 0 attempts, 1 min 50 s without an answer"):
        _wait(patience)


def test_one_object_that_always_fails_is_given_up_while_others_come():
    patience = Patience(100, Clock())
    patience.answered()
    with pytest.raises(StorageError, match=f"given up after {MAX_ATTEMPTS} attempts"):
        _wait(patience, MAX_ATTEMPTS)


def test_the_wait_is_told_now_and_then(caplog: pytest.LogCaptureFixture):
    clock = Clock()
    patience = Patience(1000, clock)
    with caplog.at_level(logging.INFO):
        for now in (20, 21, 22, 40):
            clock.now = now
            _wait(patience, 2 if now != 20 else 0)
        patience.answered()
    told = [record.message for record in caplog.records]
    assert len(told) == 3 and "it is asked again, for up to 16 min 39 s more" in told[0]
    assert told[-1] == "the store answers again"


def _job(clock: Clock, back_at: float, failures: Callable[[], Exception]) -> Callable[[], str]:
    """A job whose store answers from `back_at` on; what fails until then is a `StorageError`, as a store raises it."""

    def job() -> str:
        if clock() < back_at:
            raise StorageError("s3://b/k cannot be read") from failures()
        return "there"

    return job


def _no_way() -> Exception:
    return GenericError("Generic S3 error: HTTP error: error sending request")


def test_a_job_is_done_again_until_its_store_is_back_at_growing_intervals():
    clock = Clock()
    assert clock.patiently(600)(_job(clock, 300, _no_way), "s3://b") == "there"
    assert 300 <= clock.now < 310
    assert clock.slept[0] < 0.5 and all(5 <= pause <= 10 for pause in clock.slept[5:])
    assert all(later >= sooner for sooner, later in pairwise(clock.slept[:5]))


def test_a_job_is_given_up_when_patience_is_over_with_the_words_of_the_last_failure():
    clock = Clock()
    late = GenericError(SERVER + "503 Service Unavailable")
    failures = lambda: late if clock() > 500 else _no_way()  # noqa: E731
    with pytest.raises(StorageError, match=r"^s3://b: given up after \d+ attempts, 10 min .*503.*same command") as told:
        clock.patiently(600)(_job(clock, 9999, failures), "s3://b")
    assert 600 <= clock.now < 610 and told.value.__cause__ is late


@pytest.mark.parametrize(
    "failure",
    [PermissionDeniedError("403"), FileNotFoundError("no such key"), GenericError(SERVER + "400"), OSError(28, "full")],
)
def test_what_another_try_cannot_mend_is_raised_at_once_as_it_is(failure: Exception):
    clock = Clock()
    with pytest.raises(StorageError, match=r"^s3://b/k cannot be read$"):
        clock.patiently(600)(_job(clock, 9999, lambda: failure), "s3://b")
    assert clock.slept == []


def test_a_failure_of_no_store_is_not_waited_for():
    clock, tries = Clock(), []

    def fail(error: BaseException) -> None:
        tries.append(error)
        raise error

    for error in (StorageError("it is not what its card says"), InputError("cut"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            clock.patiently(600)(lambda error=error: fail(error), "s3://b")
    assert (len(tries), clock.slept) == (3, [])


def test_patience_of_hours_is_not_ended_by_the_number_of_attempts():
    clock = Clock()
    clock.patiently(4 * 3600)(_job(clock, 3 * 3600, _no_way), "s3://b")
    assert len(clock.slept) > 1000


def test_every_silence_is_waited_for_anew():
    clock = Clock()
    patiently = clock.patiently(600)
    for back_at in (400, 800, 1200):
        patiently(_job(clock, back_at, _no_way), "s3://b")
    assert clock.now >= 1200
