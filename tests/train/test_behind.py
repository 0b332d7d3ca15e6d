"""Jobs behind the loop are done one at a time, and a failure is raised by whoever asks next."""

import threading
import time

import pytest

from draftmill.contracts.errors import StorageError
from draftmill.train.behind import Behind


def test_a_job_is_done_while_its_giver_goes_on_and_the_next_waits_for_it() -> None:
    behind, go, done = Behind(), threading.Event(), []

    def job(number: int) -> None:
        assert go.wait(10)
        done.append(number)

    behind.do(lambda: job(1))
    assert done == []
    behind.check()
    go.set()
    behind.do(lambda: job(2))
    assert done[0] == 1
    behind.settle()
    assert done == [1, 2]


def test_a_failure_is_raised_once_by_the_next_to_ask() -> None:
    def fails() -> None:
        raise StorageError("no room")

    for ask in (Behind.settle, lambda behind: behind.do(lambda: None)):
        behind = Behind()
        behind.do(fails)
        with pytest.raises(StorageError, match="no room"):
            ask(behind)
        behind.settle()
        behind.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_ours_is_not_taken_for_done() -> None:
    behind = Behind()
    behind.do(lambda: [][0])
    with pytest.raises(AssertionError, match="fault of ours"):
        behind.settle()


def test_a_failure_is_raised_to_who_only_looks() -> None:
    def fails() -> None:
        raise StorageError("no room")

    behind = Behind()
    behind.do(fails)
    with pytest.raises(StorageError, match="no room"):
        for _ in range(1_000):
            behind.check()
            time.sleep(0.005)
    behind.check()
