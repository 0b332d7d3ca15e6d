"""What is awaited is told at growing intervals; a maker without a sign of life is given up, one at work is not."""

import logging
import threading
from collections.abc import Callable
from itertools import pairwise

import pytest

from draftmill.contracts.errors import InputError, StorageError
from draftmill.storage.waiting import Errand, StalledError, Waiting
from storage.far_store import Clock


def waiting(clock: Clock, limit_s: float, heed: Callable[[], None] = lambda: None) -> Waiting:
    return Waiting(limit_s, heed, clock, clock.sleep)


def test_what_is_there_is_given_without_a_word() -> None:
    assert waiting(clock := Clock(), 0).until(lambda: 0, "it", lambda: pytest.fail("nobody asks")) == 0
    assert clock.now == 0


def test_what_is_awaited_is_told_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    clock, told = Clock(), []
    caplog.set_level(logging.WARNING)
    waiting(clock, 9999).until(lambda: clock.now > 1000 or None, "part-7", lambda: told.append(clock.now) or "3 of 9")
    assert len(told) == 8 and all(later > 1.9 * before for before, later in pairwise(told[1:]))
    assert caplog.messages[0] == "part-7 is awaited since 11 s; 3 of 9"


def test_a_maker_without_a_sign_of_life_is_given_up_and_named() -> None:
    clock = Clock()
    with pytest.raises(StalledError, match=r"part-7 is awaited since .* \(--stall-timeout-s 60\); 3 of 9"):
        waiting(clock, 60).until(lambda: None, "part-7", lambda: "3 of 9")
    assert 60 <= clock.now < 66


def test_a_maker_of_other_parts_is_waited_for() -> None:
    clock = Clock()
    waiting(clock, 60).until(lambda: clock.now > 500 or None, "part-7", lambda: f"{clock.now // 50} of 9")
    with pytest.raises(StalledError):
        waiting(clock, 60).until(lambda: None, "part-7", lambda: f"{min(clock.now // 50, 12)} of 9")


def test_who_waits_can_be_stopped() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        waiting(Clock(), 60, stop).until(lambda: None, "it", lambda: "")
    held = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        Errand(held.wait).result(stop)
    held.set()


def test_an_errand_brings_its_failure_home() -> None:
    def fail() -> None:
        raise InputError("cut")

    with pytest.raises(InputError, match="cut"):
        Errand(fail).result(lambda: None)
    assert issubclass(StalledError, StorageError)
