"""Promise: tau counts emitted tokens per cycle, bonus included, and a stop token ends the count."""

import pytest

from draftmill.contracts.acceptance import num_accepted, summarize, walk


def test_only_the_leading_run_is_accepted() -> None:
    assert num_accepted([5, 6, 9, 8], [5, 6, 7, 8]) == 2
    assert num_accepted([1], [2]) == 0
    assert num_accepted([5, 6, 7], [5, 6]) == 2


def test_a_walk_covers_the_answer_exactly_once() -> None:
    # Accepts 3 at token 0, 0 at token 4, 5 at token 5, of which only the two tokens left count.
    accepted = [3, 0, 0, 0, 0, 5, 0, 0]
    assert walk(accepted, 8) == [4, 1, 2]


def test_macro_is_over_requests_and_micro_over_cycles() -> None:
    figures = summarize([[4, 1, 2], [8]], block_size=8)
    assert figures.tau == pytest.approx((7 / 3 + 8) / 2)
    assert figures.tau_micro == pytest.approx(15 / 4)
    assert figures.accepted_frac[0] == pytest.approx(3 / 4)
    assert figures.accepted_frac[6] == pytest.approx(1 / 4)
    assert (figures.num_requests, figures.num_cycles, figures.num_tokens) == (2, 4, 15)


def test_answers_of_one_token_have_no_cycle() -> None:
    assert walk([7], 1) == []
    with pytest.raises(ValueError, match="no verification cycle"):
        summarize([[], []], block_size=8)
