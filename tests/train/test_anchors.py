"""Draws depend on their key alone, and every sample gets its share of anchors at positions that may be one."""

import random

import numpy as np
import pytest

from draftmill.contracts.blocks import anchor_positions as ruled_positions
from draftmill.train.anchors import anchor_counts, anchor_positions, draw_anchors, permutation


@pytest.mark.parametrize("seed", range(20))
def test_anchor_positions_are_those_of_the_block_rule(seed: int) -> None:
    rng = random.Random(seed)
    mask = [rng.random() < 0.6 for _ in range(rng.randint(1, 30))]
    assert anchor_positions(np.array(mask)).tolist() == ruled_positions(mask, [0] * len(mask))


def test_a_sample_gets_its_share_of_anchors_rounded_up_as_far_as_it_has_positions() -> None:
    eligible, lengths = np.array([100, 100, 7]), np.array([300, 301, 300])
    assert anchor_counts(eligible, lengths, num_anchors=512, max_tokens=3072).tolist() == [50, 51, 7]
    assert anchor_counts(np.array([9]), np.array([1]), num_anchors=8, max_tokens=1000).tolist() == [1]


def drawn(epoch: int = 0, sample_id: str = "a", draw: int = 0, seed: int = 0) -> list[int]:
    mask = np.ones(40, dtype=np.bool_)
    return draw_anchors(mask, 8, seed=seed, epoch=epoch, sample_id=sample_id, draw=draw).tolist()


def test_anchors_are_distinct_ascending_and_fresh_for_every_part_of_the_key() -> None:
    draws = [drawn(), drawn(epoch=1), drawn(sample_id="b"), drawn(draw=1), drawn(seed=1)]
    assert all(draw == sorted(set(draw)) and len(draw) == 8 for draw in draws)
    assert len({tuple(draw) for draw in draws}) == len(draws)
    assert drawn() == draws[0]


def test_a_draw_is_the_same_on_every_machine_and_in_every_version() -> None:
    assert permutation(8, "order", 0, 0).tolist() == [7, 5, 2, 4, 6, 3, 0, 1]
    assert drawn() == [1, 10, 12, 15, 19, 21, 27, 36]


def test_every_position_is_drawn_about_as_often() -> None:
    counts = np.bincount([a for i in range(2000) for a in drawn(sample_id=f"s{i}")], minlength=40)
    assert counts[39] == 0  # no successor
    assert counts[:39].min() > 0.8 * 2000 * 8 / 39


def test_a_permutation_is_one() -> None:
    assert sorted(permutation(1000, "order", 3, 1).tolist()) == list(range(1000))
