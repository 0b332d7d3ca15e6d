"""Laps leave no gap: their seconds add up to those of the clock, whatever happens between them."""

import pytest

pytest.importorskip("torch")
from draftmill.train.clock import Laps

pytestmark = pytest.mark.torch


def test_laps_go_from_the_end_of_one_to_the_end_of_the_next() -> None:
    times = iter([5.0, 7.0, 7.5, 20.0])
    laps = Laps(lambda: next(times))
    assert [laps.lap_s() for _ in range(3)] == [2.0, 0.5, 12.5]
