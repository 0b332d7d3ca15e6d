"""An answer may take what its longest form needs at the slowest rate seen lately, four times over."""

import pytest

from draftmill.serving.patience import SLACK, Patience


def test_before_any_answer_the_stated_rate_is_assumed() -> None:
    patience = Patience(min_timeout_s=10.0, min_rate_tok_per_s=5.0)
    assert patience.timeout_s(2000, 0) == 400.0
    assert patience.timeout_s(1, 0) == 10.0


def test_each_timeout_of_a_request_doubles_its_next() -> None:
    assert [Patience(10.0, 5.0).timeout_s(1, n) for n in range(3)] == [10.0, 20.0, 40.0]


def test_a_slow_answer_counts_at_once_and_fast_ones_little_by_little() -> None:
    patience = Patience(1.0, 5.0)
    assert patience.observed(10.0, 1000) == 0.01
    assert patience.timeout_s(2000, 0) == pytest.approx(SLACK * 20)
    patience.observed(100.0, 1000)
    assert patience.timeout_s(2000, 0) == pytest.approx(SLACK * 200)
    patience.observed(10.0, 1000)
    assert SLACK * 190 < patience.timeout_s(2000, 0) < SLACK * 200
    for _ in range(500):
        patience.observed(10.0, 1000)
    assert patience.timeout_s(2000, 0) == pytest.approx(SLACK * 20, rel=0.01)


def test_an_answer_of_one_token_says_little_about_the_rate() -> None:
    patience = Patience(1.0, 5.0)
    assert patience.observed(1.6, 1) == pytest.approx(0.1)
