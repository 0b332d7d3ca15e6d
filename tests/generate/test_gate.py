"""The gate refuses what lost, repeated or emptied too many rows, and names the figure, the threshold and the flag."""

from typing import Any

import pytest

from draftmill.contracts.cards import Dropped, PartRecord
from draftmill.contracts.errors import DataGateError
from draftmill.generate.conversation import CUT, EMPTY
from draftmill.generate.gate import judge, judge_whole
from draftmill.generate.prompts import REPEATED_ID
from draftmill.settings.generate import GenerateSettings


def record(rows: int, *reasons: str) -> PartRecord:
    dropped = tuple(Dropped(file="p.jsonl", line=n, id=None, reason=reason) for n, reason in enumerate(reasons))
    return PartRecord(
        name="part-00000",
        file="part-00000.jsonl",
        rows_in=rows + len(dropped),
        rows=rows,
        tokens=0,
        bytes=0,
        sha256="",
        plan="",
        dropped=dropped,
    )


def limits(**changed: Any) -> GenerateSettings:
    return GenerateSettings(input=("p",), output=("o",), target="t", **changed)


@pytest.mark.parametrize(
    ("reason", "count", "flag", "words"),
    [
        (CUT, 21, "max_dropped_frac", r"10\.5% of 200 rows were dropped \(cut at max_new_tokens: 21\)"),
        (REPEATED_ID, 11, "max_duplicate_frac", r"5\.5% of 200 rows repeat the id"),
        (EMPTY, 5, "max_empty_frac", r"2\.5% of 200 rows were answered with nothing"),
    ],
)
def test_each_share_has_a_threshold_and_a_flag(reason: str, count: int, flag: str, words: str) -> None:
    bad = record(200 - count, *[reason] * count)
    with pytest.raises(DataGateError, match=f"{words}(.|\n)*--{flag.replace('_', '-')}"):
        judge([bad], limits(), "the set")
    judge([record(200 - count + 1, *[reason] * (count - 1))], limits(), "the set")
    judge([bad], limits(**{flag: 1.0}), "the set")


def test_all_parts_are_judged_together() -> None:
    judge([record(180, *[CUT] * 15), record(100)], limits(), "the set")
    with pytest.raises(DataGateError):
        judge([record(180, *[CUT] * 15), record(100, *[CUT] * 30)], limits(), "the set")


def test_a_handful_of_rows_is_not_judged_by_shares() -> None:
    judge([record(10, *[CUT] * 9)], limits(), "part-00000")
    with pytest.raises(DataGateError):
        judge([record(10, *[CUT] * 9)], limits(min_judged=19), "part-00000")


def test_a_set_without_answers_is_refused() -> None:
    with pytest.raises(DataGateError, match=r"0 rows have an answer \(cut at max_new_tokens: 3\).*--min-rows"):
        judge_whole([record(0, *[CUT] * 3)], limits())
    with pytest.raises(DataGateError, match="5 rows have an answer"):
        judge_whole([record(5)], limits(min_rows=6))
    judge_whole([record(1)], limits())
