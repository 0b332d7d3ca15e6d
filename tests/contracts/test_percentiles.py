"""A percentile is a number that occurs: the smallest that so many of all do not exceed."""

from draftmill.contracts.percentiles import percentiles


def test_percentiles_are_numbers_that_occur() -> None:
    counts = {80: 10, 6: 87, 1: 2, 0: 1}
    assert percentiles(counts, (5, 50, 95)) == {"min": 0, "p5": 6, "p50": 6, "p95": 80, "max": 80}
    assert percentiles({7: 1}, (50,)) == {"min": 7, "p50": 7, "max": 7}
    assert percentiles({}, (50,)) == {}


def test_a_share_that_is_reached_exactly_is_reached() -> None:
    assert percentiles({1: 19, 2: 1}, (95, 96)) == {"min": 1, "p95": 1, "p96": 2, "max": 2}
