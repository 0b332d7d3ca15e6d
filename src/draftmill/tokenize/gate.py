"""The gate before the card: a set that would teach nothing is refused, with the figures that say so.

The lesson of a real set of 914,000 samples of which 87 % carried exactly six supervised tokens (an empty answer printed
by the template) while every stage reported success.
"""

import sys
from collections.abc import Sequence

from draftmill.contracts.cards import Dropped, count_reasons, told_reasons
from draftmill.contracts.errors import DataGateError
from draftmill.settings.tokenize import GateSettings
from draftmill.tokenize.figures import PartStats
from draftmill.tokenize.histogram import show
from draftmill.tokenize.part import DUPLICATE

# Beyond it, another policy is worth its larger set.
_MANY_UNSUPERVISED = 0.1


def judge(figures: PartStats, limits: GateSettings, what: str, dropped: Sequence[Dropped] = ()) -> None:
    """DataGateError naming every figure beyond its threshold, and the flag that moves it.

    `dropped`: rows that were left out, as far as they are known one by one; the first of them is named.
    """
    found = [*_row_faults(figures, limits, _told(dropped)), *_sample_faults(figures, limits)]
    if found:
        show(figures, what)
        raise DataGateError(
            f"the gate refuses {what}:\n  - " + "\n  - ".join(found) + "\n"
            "Look at samples with draftmill inspect --row N; give the flag named above where the data are meant so"
        )


def advise(figures: PartStats, turns: str | None) -> None:
    """Says on stderr what would keep the answers that the policy `turns` leaves out, where they are many.

    No reason to refuse a set: what is left in it is right.
    """
    if turns in ("faithful", "last") and figures.answers_unsupervised_frac > _MANY_UNSUPERVISED:
        sys.stderr.write(
            f"  --turns {turns} trains on none of these {figures.answers_unsupervised:,} answers; --turns expand makes "
            "a sample of each that the target was asked for\n"
        )


def _told(dropped: Sequence[Dropped]) -> str:
    """Why rows were left out, and where the first one stands."""
    others = [row for row in dropped if row.reason != DUPLICATE]
    if not others:
        return ""
    return f"; {told_reasons(count_reasons(others))}, the first in {others[0].file} line {others[0].line:,}"


def _row_faults(figures: PartStats, limits: GateSettings, reasons: str) -> list[str]:
    if figures.rows < limits.min_judged:
        return []
    faults = []
    dropped_frac = figures.dropped / figures.rows
    if dropped_frac > limits.max_dropped_frac:
        faults.append(
            f"{dropped_frac:.1%} of {figures.rows:,} rows were dropped (at most {limits.max_dropped_frac:.1%}: "
            f"--max-dropped-frac){reasons}"
        )
    duplicate_frac = figures.duplicate_rows / figures.rows
    if duplicate_frac > limits.max_duplicate_frac:
        faults.append(
            f"{duplicate_frac:.1%} of {figures.rows:,} rows repeat the id of another "
            f"(at most {limits.max_duplicate_frac:.1%}: --max-duplicate-frac)"
        )
    return faults


def _sample_faults(figures: PartStats, limits: GateSettings) -> list[str]:
    if figures.samples < limits.min_judged:
        return []
    faults = []
    number, frac = figures.spike(limits.spike_tokens)
    if frac > limits.max_spike_frac:
        faults.append(
            f"{frac:.1%} of {figures.samples:,} samples have exactly {number} supervised tokens "
            f"(at most {limits.max_spike_frac:.1%} may share a number up to {limits.spike_tokens}: --max-spike-frac); "
            "an empty answer printed by the template looks like this"
        )
    if figures.supervised_frac < limits.min_supervised_frac:
        faults.append(
            f"{figures.supervised_frac:.1%} of {figures.tokens:,} tokens are supervised "
            f"(at least {limits.min_supervised_frac:.1%}: --min-supervised-frac)"
        )
    duplicate_frac = figures.duplicate_samples / figures.samples
    if figures.with_mask > limits.max_dropped_frac * figures.samples:
        faults.append(
            f"{figures.with_mask / figures.samples:.1%} of {figures.samples:,} samples hold the mask token: train "
            f"would drop them (at most {limits.max_dropped_frac:.1%}: --max-dropped-frac, or another --mask-id)"
        )
    if duplicate_frac > limits.max_duplicate_frac:
        faults.append(
            f"{duplicate_frac:.1%} of {figures.samples:,} samples repeat the tokens of another "
            f"(at most {limits.max_duplicate_frac:.1%}: --max-duplicate-frac)"
        )
    return faults
