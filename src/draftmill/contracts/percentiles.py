"""How counts by a number of tokens are summed up on a card."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate


def percentiles(counts: Mapping[int, int], percents: Sequence[int]) -> dict[str, int]:
    """The smallest number, those that `percents` of all do not exceed (`p50`), and the largest; empty without any."""
    if not counts:
        return {}
    numbers = sorted(counts)
    reached = list(accumulate(counts[number] for number in numbers))
    at = {f"p{percent}": numbers[bisect_left(reached, percent * reached[-1] / 100)] for percent in percents}
    return {"min": numbers[0], **at, "max": numbers[-1]}
