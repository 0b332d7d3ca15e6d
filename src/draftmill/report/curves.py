"""Curves and bars as figures for inline SVG: points on a fixed canvas, thinned to what a page can show."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

WIDTH, HEIGHT = 640, 200
# More points than this are not told apart at that width.
MAX_POINTS = 320


@dataclass(frozen=True)
class Curve:
    """One line: `points` in SVG's form, and the values at its ends and extremes."""

    title: str
    points: str
    first_step: int
    last_step: int
    low: float
    high: float
    last: float


def curve(title: str, metrics: Sequence[dict[str, Any]], key: str) -> Curve | None:
    """The curve of `key` over steps, means of bins where there are many; None where no step has a figure."""
    values = [(m["step"], m[key]) for m in metrics if m.get(key) is not None]
    if not values:
        return None
    steps, heights = _thinned(values)
    low, high = min(heights), max(heights)
    return Curve(
        title=title,
        points=" ".join(
            f"{_scaled(s, steps[0], steps[-1], WIDTH):.1f},{HEIGHT - _scaled(h, low, high, HEIGHT):.1f}"
            for s, h in zip(steps, heights, strict=True)
        ),
        first_step=values[0][0],
        last_step=values[-1][0],
        low=low,
        high=high,
        last=heights[-1],
    )


def _thinned(values: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    size = -(-len(values) // MAX_POINTS)
    bins = [values[at : at + size] for at in range(0, len(values), size)]
    return [fmean(step for step, _ in some) for some in bins], [fmean(value for _, value in some) for some in bins]


def _scaled(value: float, low: float, high: float, size: int) -> float:
    return size / 2 if high == low else (value - low) / (high - low) * size


@dataclass(frozen=True)
class Bar:
    """One bar: its label, its figure as text, and its length as a share of the longest, in percent."""

    label: str
    figure: str
    percent: float


def bars(entries: Sequence[tuple[str, float, str]]) -> list[Bar]:
    """Bars of (label, value, figure as text), scaled to the longest."""
    longest = max((value for _, value, _ in entries), default=0) or 1
    return [Bar(label, figure, round(100 * value / longest, 1)) for label, value, figure in entries]
