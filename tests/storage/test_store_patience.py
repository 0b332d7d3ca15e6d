"""A store is asked again while that may help and while anything of it is heard; then the failure says what to do."""

import asyncio
import logging

import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError

from draftmill.contracts.errors import StorageError
from draftmill.storage.failures import is_transient
from draftmill.storage.patience import MAX_ATTEMPTS, Patience

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


class _Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _wait(patience: Patience, attempt: int = 0) -> None:
    asyncio.run(patience.wait("s3://b/k", GenericError(SERVER + "503"), attempt))


def test_silence_ends_in_an_error_and_any_answer_ends_the_silence():
    clock = _Clock()
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
    patience = Patience(100, _Clock())
    patience.answered()
    with pytest.raises(StorageError, match=f"given up after {MAX_ATTEMPTS} attempts"):
        _wait(patience, MAX_ATTEMPTS)


def test_the_wait_is_told_now_and_then(caplog: pytest.LogCaptureFixture):
    clock = _Clock()
    patience = Patience(1000, clock)
    with caplog.at_level(logging.INFO):
        for now in (20, 21, 22, 40):
            clock.now = now
            _wait(patience, 2 if now != 20 else 0)
        patience.answered()
    told = [record.message for record in caplog.records]
    assert len(told) == 3 and "it is asked again, for up to 16 min 39 s more" in told[0]
    assert told[-1] == "the store answers again"
