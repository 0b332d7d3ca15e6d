"""Promises: answers that differ are refused unless the two best logits lie within 1e-3 where they first differ."""

import pytest

from draftmill.contracts.errors import DataGateError
from draftmill.evaluate.lossless import SERVED_TIE_LOGITS, TIE_LOGITS, compare_answers, compare_walk
from draftmill.speculation.decode import Choice, Speculation
from draftmill.speculation.walk import Walked

pytestmark = pytest.mark.torch

TIE = TIE_LOGITS["float32"]
PLAIN = Choice((5, 6, 7), (1.0, TIE / 2, 1.0))


def test_equal_answers_have_no_tie():
    assert compare_answers("p", "a and b", PLAIN, [5, 6, 7], TIE) is None


def test_a_first_difference_at_a_tie_is_excused_and_told():
    tie = compare_answers("p", "a and b", PLAIN, [5, 9, 1], TIE)
    assert tie is not None
    assert (tie.position, tie.token_ids, tie.between) == (1, (6, 9), "a and b")


@pytest.mark.parametrize("other", [[4, 6, 7], [5, 6, 8], [5, 6], [5, 6, 7, 8]])
def test_any_other_difference_is_refused_naming_prompt_position_tokens_and_gap(other):
    with pytest.raises(DataGateError, match=r"prompt 'p' differ at answer token \d.*logits") as refused:
        compare_answers("p", "a and b", PLAIN, other, TIE)
    assert refused.value.exit_code == 3


def test_rounding_excuses_no_more_than_it_can_change():
    wide = Choice((5, 6, 7), (1.0, 0.4, 1.0))
    assert compare_answers("p", "a and b", wide, [5, 9, 1], SERVED_TIE_LOGITS) is not None
    assert compare_answers("p", "a and b", wide, [5, 9, 1], TIE_LOGITS["bfloat16"]) is not None
    for ids, tie in (([5, 9, 1], TIE), ([4, 6, 7], SERVED_TIE_LOGITS)):
        with pytest.raises(DataGateError):
            compare_answers("p", "a and b", wide, ids, tie)


def speculation(gap: float) -> Speculation:
    return Speculation((1, 2, 3, 4), (2, 1), (Choice((2, 9), (1.0, 1.0)), Choice((4, 4), (gap, 1.0))))


def test_a_walk_that_emits_the_same_is_fine_whatever_was_drafted_behind():
    assert (
        compare_walk(
            "p", speculation(1.0), Walked((2, 1), (Choice((2, 8), (1.0, 1.0)), Choice((4, 4), (1.0, 1.0)))), TIE
        )
        is None
    )


def test_a_walk_that_differs_at_a_drafter_tie_is_excused():
    walked = Walked((2, 2), (Choice((2, 9), (1, 1)), Choice((3, 4), (1, 1))))
    tie = compare_walk("p", speculation(TIE / 2), walked, TIE)
    assert tie is not None
    assert (tie.position, tie.token_ids) == (3, (4, 3))


def test_a_walk_that_differs_for_no_reason_is_refused():
    other_draft = Walked((2, 2), (Choice((2, 9), (1, 1)), Choice((3, 4), (1, 1))))
    same_draft = Walked((2, 2), (Choice((2, 9), (1, 1)), Choice((4, 4), (1, 1))))
    for walked in (other_draft, same_draft):
        with pytest.raises(DataGateError, match="parallel walk is not what decoding does: prompt 'p', cycle 1"):
            compare_walk("p", speculation(1.0), walked, TIE)
