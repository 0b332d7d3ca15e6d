"""The gate: a set of which too much was lost, repeated or left empty is refused, with the figures that say so."""

from collections import Counter
from collections.abc import Sequence

from draftmill.contracts.cards import PartRecord
from draftmill.contracts.errors import DataGateError
from draftmill.generate.conversation import EMPTY
from draftmill.generate.prompts import REPEATED_ID
from draftmill.settings.generate import GenerateSettings


def judge(records: Sequence[PartRecord], limits: GenerateSettings, what: str) -> None:
    """DataGateError naming every share beyond its threshold, and the flag that moves it."""
    rows_in = sum(record.rows_in for record in records)
    if rows_in < limits.min_judged:
        return
    reasons = Counter(drop.reason for record in records for drop in record.dropped)
    repeated, empty = reasons[REPEATED_ID], reasons[EMPTY]
    other = ", ".join(f"{reason}: {n:,}" for reason, n in reasons.most_common() if reason not in (REPEATED_ID, EMPTY))
    shares = (
        (reasons.total() - repeated - empty, f"were dropped ({other})", limits.max_dropped_frac, "max-dropped-frac"),
        (repeated, "repeat the id of another", limits.max_duplicate_frac, "max-duplicate-frac"),
        (empty, "were answered with nothing", limits.max_empty_frac, "max-empty-frac"),
    )
    found = [
        f"{count / rows_in:.1%} of {rows_in:,} rows {words}; at most {limit:.1%} may: --{flag}"
        for count, words, limit, flag in shares
        if count > limit * rows_in
    ]
    _refuse(what, found)


def judge_whole(records: Sequence[PartRecord], limits: GenerateSettings) -> None:
    """As `judge`, of the whole set, which must have rows besides."""
    rows = sum(record.rows for record in records)
    if rows < limits.min_rows:
        reasons = Counter(drop.reason for record in records for drop in record.dropped)
        lost = ", ".join(f"{reason}: {n:,}" for reason, n in reasons.most_common())
        _refuse("the set", [f"{rows:,} rows have an answer ({lost}); at least {limits.min_rows:,} must: --min-rows"])
    judge(records, limits, "the set")


def _refuse(what: str, found: list[str]) -> None:
    if found:
        raise DataGateError(
            f"the gate refuses {what}:\n  - "
            + "\n  - ".join(found)
            + "\nLook at the rows named in the part records; give the flag named above where the data are meant so"
        )
