"""A histogram of supervised tokens per sample, as text for people."""

import sys

from draftmill.tokenize.figures import PartStats, bins

_BAR_WIDTH = 40


def show(figures: PartStats, title: str) -> None:
    """Writes the histogram to stderr."""
    sys.stderr.write(histogram(figures, title) + "\n")


def histogram(figures: PartStats, title: str) -> str:
    """Lines with a bar per bin (bins double), its share, and the commonest number where it makes up half its bin."""
    lines = [f"{title}: supervised tokens per sample, {figures.samples:,} samples"]
    groups = bins(figures.supervised_counts)
    tallest = max((count for _, _, count in groups), default=1) or 1
    for low, high, count in groups:
        label = f"{low:,}" if low == high else f"{low:,}-{high:,}"
        bar = "█" * round(_BAR_WIDTH * count / tallest) or ("▏" if count else "")
        lines.append(
            f"  {label:>15} {bar:<{_BAR_WIDTH}} {count / figures.samples:6.1%}{_peak(figures, low, high, count)}"
        )
    return "\n".join(lines)


def _peak(figures: PartStats, low: int, high: int, count: int) -> str:
    inside = {n: c for n, c in figures.supervised_counts.items() if low <= n <= high}
    number = max(inside, key=lambda n: inside[n], default=0)
    is_peak = low != high and count and inside[number] * 2 >= count
    return f"  {inside[number] / figures.samples:.1%} at exactly {number}" if is_peak else ""
