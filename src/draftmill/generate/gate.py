"""The gate: a set of which too much was lost, repeated, cut or left empty is refused, with the figures that say so."""

from collections import Counter
from collections.abc import Collection, Sequence

from draftmill.contracts.cards import PartRecord, count_reasons, told_reasons
from draftmill.contracts.errors import DataGateError
from draftmill.generate.answers import CUT, EMPTY, LOCKED, OPEN_THINKING
from draftmill.generate.exclusion import EXCLUDED
from draftmill.generate.survey import REPEATED_CONTENT, REPEATED_ID
from draftmill.settings.generate import GenerateGate

_REPEATED = (REPEATED_ID, REPEATED_CONTENT)
EMPTY_REASONS = (EMPTY, OPEN_THINKING)


def judge(records: Sequence[PartRecord], limits: GenerateGate, what: str) -> None:
    """DataGateError naming every share beyond its threshold, and the flag that moves it. Failed rows are not judged:
    they may get their answers yet."""
    _refuse(what, _beyond(records, limits, _shares(records, limits)))


def judge_whole(records: Sequence[PartRecord], limits: GenerateGate) -> None:
    """As `judge`, of the whole set, which must have rows besides, and few that failed."""
    rows = sum(record.rows for record in records)
    if rows < limits.min_rows:
        lost = losses(records)
        found = [f"{rows:,} rows have an answer ({told_reasons(lost)}); at least {limits.min_rows:,} must: --min-rows"]
        _refuse("the set", found)
    failed = count_reasons(drop for record in records for drop in record.failed)
    share = (failed, "failed: run the same command again, which asks for exactly them,", limits.max_failed_frac)
    _refuse("the set", _beyond(records, limits, [(*share, "max-failed-frac"), *_shares(records, limits)]))


_Share = tuple["Counter[str]", str, float, str]


def _shares(records: Sequence[PartRecord], limits: GenerateGate) -> list[_Share]:
    """For each judged kind of loss: its rows by reason, what they are, the largest share, and its flag."""
    dropped = count_reasons(drop for record in records for drop in record.dropped)
    aside = aside_of(records)
    return [
        (_without(dropped, (*_REPEATED, EXCLUDED)), "were dropped", limits.max_dropped_frac, "max-dropped-frac"),
        (_only(dropped, _REPEATED), "repeat another", limits.max_duplicate_frac, "max-duplicate-frac"),
        (_only(aside, EMPTY_REASONS), "were answered with nothing", limits.max_empty_frac, "max-empty-frac"),
        (
            _only(aside, (CUT,)),
            "have an answer that was cut (give more --max-new-tokens, or --on-length keep)",
            limits.max_cut_frac,
            "max-cut-frac",
        ),
        (_only(aside, (LOCKED,)), "end in a cycle", limits.max_repetition_frac, "max-repetition-frac"),
        (
            _without(aside, (*EMPTY_REASONS, CUT, LOCKED)),
            "have an answer that cannot be used",
            limits.max_broken_frac,
            "max-broken-frac",
        ),
    ]


def _beyond(records: Sequence[PartRecord], limits: GenerateGate, shares: Sequence[_Share]) -> list[str]:
    rows_in = sum(record.rows_in for record in records)
    judged = max(rows_in, limits.min_judged)
    return [
        f"{reasons.total():,} of {rows_in:,} rows ({reasons.total() / rows_in:.1%}) {words} "
        f"({told_reasons(reasons)}); at most {limit:.1%} of "
        f"{judged:,}{' (as of so many at least)' if judged > rows_in else ''} may: --{flag}"
        for reasons, words, limit, flag in shares
        if reasons.total() > limit * judged
    ]


def losses(records: Sequence[PartRecord]) -> Counter[str]:
    """Rows that are not in the set, by reason."""
    return count_reasons(drop for record in records for drop in (*record.dropped, *record.failed)) + aside_of(records)


def aside_of(records: Sequence[PartRecord]) -> Counter[str]:
    """Rows set aside, by reason."""
    found: Counter[str] = Counter()
    for record in records:
        found.update(record.set_aside.reasons if record.set_aside else {})
    return found


def _only(counts: Counter[str], reasons: Collection[str]) -> Counter[str]:
    return Counter({reason: n for reason, n in counts.items() if reason in reasons})


def _without(counts: Counter[str], reasons: Collection[str]) -> Counter[str]:
    return Counter({reason: n for reason, n in counts.items() if reason not in reasons})


def _refuse(what: str, found: list[str]) -> None:
    if found:
        raise DataGateError(
            f"the gate refuses {what}:\n  - "
            + "\n  - ".join(found)
            + "\nLook at the rows that the part records name and at the .aside files; give the flag named above where "
            "the data are meant so"
        )
