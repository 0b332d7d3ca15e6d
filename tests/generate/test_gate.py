"""The gate refuses what lost, repeated, cut or emptied too many rows, and names figure, threshold and flag."""

from typing import Any

import pytest

from draftmill.contracts.cards import AsideFile, Dropped, PartRecord
from draftmill.contracts.errors import DataGateError
from draftmill.generate.answers import BROKEN_TAGS, CUT, EMPTY, LOCKED, NO_THINKING, OPEN_THINKING
from draftmill.generate.exclusion import EXCLUDED
from draftmill.generate.gate import judge, judge_whole, losses
from draftmill.generate.survey import REPEATED_CONTENT, REPEATED_ID
from draftmill.settings.generate import GenerateSettings


def record(rows: int, *dropped: str, aside: dict[str, int] | None = None, failed: int = 0) -> PartRecord:
    def left_out(*reasons: str) -> tuple[Dropped, ...]:
        return tuple(Dropped(file="p.jsonl", line=n, id=None, reason=reason) for n, reason in enumerate(reasons))

    num_aside = sum((aside or {}).values())
    return PartRecord(
        name="part-00000",
        file="part-00000.jsonl",
        rows_in=rows + len(dropped) + num_aside + failed,
        rows=rows,
        tokens=0,
        bytes=0,
        sha256="",
        plan="",
        dropped=left_out(*dropped),
        set_aside=AsideFile(file="a", rows=num_aside, bytes=0, sha256="", reasons=aside) if aside else None,
        failed=left_out(*["refused with HTTP 400"] * failed),
    )


def limits(**changed: Any) -> GenerateSettings:
    return GenerateSettings(input=("p",), output=("o",), target="t", **changed)


@pytest.mark.parametrize(
    ("reason", "count", "flag", "words"),
    [
        ("broken JSON", 21, "max_dropped_frac", r"21 of 200 rows \(10\.5%\) were dropped \(broken JSON: 21\)"),
        (REPEATED_ID, 11, "max_duplicate_frac", r"11 of 200 rows \(5\.5%\) repeat another"),
        (REPEATED_CONTENT, 11, "max_duplicate_frac", "repeat another"),
        (EMPTY, 5, "max_empty_frac", r"5 of 200 rows \(2\.5%\) were answered with nothing"),
        (OPEN_THINKING, 5, "max_empty_frac", "answered with nothing"),
        (CUT, 21, "max_cut_frac", "have an answer that was cut"),
        (LOCKED, 11, "max_repetition_frac", "end in a cycle"),
        (NO_THINKING, 5, "max_broken_frac", "cannot be used .wrong mode"),
        (BROKEN_TAGS, 5, "max_broken_frac", "cannot be used .broken think tags"),
    ],
)
def test_each_share_has_a_threshold_and_a_flag(reason: str, count: int, flag: str, words: str) -> None:
    def bad(number: int) -> PartRecord:
        is_dropped = reason in ("broken JSON", REPEATED_ID, REPEATED_CONTENT)
        drops, aside = ([reason] * number, None) if is_dropped else ([], {reason: number})
        return record(200 - number, *drops, aside=aside)

    with pytest.raises(DataGateError, match=f"{words}(.|\n)*--{flag.replace('_', '-')}"):
        judge([bad(count)], limits(), "the set")
    judge([bad(count - 1)], limits(), "the set")
    judge([bad(count)], limits(**{flag: 1.0}), "the set")


def test_failed_rows_are_judged_at_the_end_alone() -> None:
    judge([record(90, failed=110)], limits(), "part-00000")
    with pytest.raises(
        DataGateError, match=r"run the same command again, which asks for exactly them(.|\n)*--max-failed-frac"
    ):
        judge_whole([record(195, failed=5)], limits())
    judge_whole([record(196, failed=4)], limits())


def test_what_was_excluded_on_purpose_is_no_loss() -> None:
    judge([record(10, *[EXCLUDED] * 190)], limits(), "the set")


def test_all_parts_are_judged_together() -> None:
    judge([record(180, aside={CUT: 18}), record(100)], limits(), "the set")
    with pytest.raises(DataGateError):
        judge([record(180, aside={CUT: 18}), record(100, aside={CUT: 30})], limits(), "the set")
    assert losses([record(1, EMPTY, aside={CUT: 2}), record(1, aside={CUT: 1}, failed=1)]).total() == 5


def test_a_share_of_a_handful_of_rows_is_taken_of_more() -> None:
    judge([record(10, aside={CUT: 9})], limits(), "part-00000")
    with pytest.raises(DataGateError):
        judge([record(10, aside={CUT: 9})], limits(min_judged=19), "part-00000")
    # However few they are, not all may fail.
    with pytest.raises(DataGateError):
        judge_whole([record(17, failed=3)], limits())


def test_a_set_without_answers_is_refused() -> None:
    with pytest.raises(DataGateError, match=r"0 rows have an answer \(cut at max_new_tokens: 3\).*--min-rows"):
        judge_whole([record(0, aside={CUT: 3})], limits())
    with pytest.raises(DataGateError, match="5 rows have an answer"):
        judge_whole([record(5)], limits(min_rows=6))
    judge_whole([record(1)], limits())
