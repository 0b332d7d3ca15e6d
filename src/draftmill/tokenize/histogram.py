"""The figures of a tokenized set as text for people: a histogram of supervised tokens per sample, and a line each."""

import sys

from draftmill.contracts.percentiles import percentiles
from draftmill.tokenize.figures import PERCENTILES, PartStats, bins

_BAR_WIDTH = 40


def show(figures: PartStats, title: str) -> None:
    """Writes the histogram and the other figures to stderr."""
    sys.stderr.write(histogram(figures, title) + "\n" + summary(figures) + "\n")


def summary(figures: PartStats) -> str:
    """Lengths and shares, a line each; what there is none of is left out."""
    samples = max(figures.samples, 1)
    lengths = ", ".join(
        f"{name} {number:,}" for name, number in percentiles(figures.length_counts, PERCENTILES).items()
    )
    lines = [
        f"{figures.tokens:,} tokens, {figures.supervised_frac:.1%} of them supervised",
        f"tokens per sample: {lengths}" if lengths else "",
        f"{figures.truncated:,} samples cut at their limit ({figures.truncated_frac:.1%})" if figures.truncated else "",
        f"{figures.thinking_frac:.1%} of the rows with reasoning" if figures.thinking_rows else "",
        f"{figures.answers_unsupervised:,} of {figures.answers:,} answers are history alone, not supervised "
        f"({figures.answers_unsupervised_frac:.1%})"
        if figures.answers_unsupervised
        else "",
        f"{figures.dropped:,} of {figures.rows:,} rows dropped" if figures.dropped else "",
        f"{figures.duplicate_rows:,} rows repeat an id" if figures.duplicate_rows else "",
        f"{figures.duplicate_samples:,} samples repeat the tokens of another" if figures.duplicate_samples else "",
        f"{figures.with_mask:,} samples hold the mask token ({figures.with_mask / samples:.1%})"
        if figures.with_mask
        else "",
        f"{figures.differing:,} checked rows came out differently from the fast engine" if figures.differing else "",
    ]
    return "\n".join(f"  {line}" for line in lines if line)


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
