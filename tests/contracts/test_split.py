"""Promise: which side a row falls on depends on its id alone."""

import pytest

from draftmill.contracts.split import is_held_out, is_in_split


def test_the_share_is_met_and_the_sides_are_disjoint() -> None:
    ids = [f"row-{i}" for i in range(4000)]
    held_out = [i for i in ids if is_held_out(i, 0.15)]
    assert len(held_out) / len(ids) == pytest.approx(0.15, abs=0.02)
    assert all(is_in_split(i, "train", 0.15) != is_in_split(i, "held-out", 0.15) for i in ids)
    assert all(is_in_split(i, "all", 0.15) for i in ids)


def test_a_larger_share_keeps_the_rows_of_a_smaller_one() -> None:
    ids = [f"row-{i}" for i in range(500)]
    assert {i for i in ids if is_held_out(i, 0.1)} <= {i for i in ids if is_held_out(i, 0.2)}
