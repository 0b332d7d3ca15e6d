"""Packing loses no sample, cuts no draw, and depends on (seed, epoch, kept samples) alone; part by part at first."""

import logging
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from draftmill.contracts.errors import RecipeError
from draftmill.settings.train import TrainSettings
from draftmill.train.gate import KeptSample
from draftmill.train.rows import PlannedRow, RowPlan, Visits

rng = random.Random(0)
KEPT = tuple(KeptSample(3 * i, length := rng.randint(2, 60), rng.randint(1, length - 1)) for i in range(50))
LENGTHS = {sample.index: sample.length for sample in KEPT}


def plan(parts: Sequence[Sequence[KeptSample]] = (KEPT,), **changed: int) -> RowPlan:
    settings = {"max_tokens": 100, "num_anchors": 40, "rows_per_step": 2, **changed}
    chosen = TrainSettings(input="in", output=("out",), target="t", **settings)  # type: ignore[arg-type]
    return RowPlan(len(parts), lambda part: parts[part], chosen)


def rows(found: RowPlan, num_steps: int) -> list[PlannedRow]:
    return [row for step in range(num_steps) for row in found.micros_of(step)]


def test_every_epoch_visits_every_kept_sample_once() -> None:
    found = plan()
    visits = Counter((row.epoch, index) for row in rows(found, found.num_steps(3)) for index in row.samples)
    assert all(visits[epoch, index] == 1 for epoch in range(3) for index in LENGTHS)


def test_no_row_exceeds_its_tokens_or_its_anchors() -> None:
    found = rows(plan(), 30)
    assert all(sum(LENGTHS[i] for i in row.samples) <= 100 and sum(row.counts) <= 40 for row in found)
    assert sum(len(row.samples) for row in found) / len(found) > 2


def test_epochs_differ_in_order_and_seeds_do_too() -> None:
    found = plan()
    per_epoch = {
        e: [i for row in rows(found, found.num_steps(2)) if row.epoch == e for i in row.samples] for e in (0, 1)
    }
    assert per_epoch[0] != per_epoch[1][:50]
    assert rows(plan(), 5) != rows(plan(seed=1), 5)


def test_a_step_asked_for_out_of_order_is_the_same_step() -> None:
    forward = plan()
    expected = [forward.micros_of(step) for step in range(40)]
    for step in (39, 0, 17, 38, 2):
        assert plan().micros_of(step) == expected[step]


def test_a_step_takes_as_many_rows_as_it_says_across_epochs() -> None:
    assert all(len(plan(rows_per_step=3).micros_of(step)) == 3 for step in range(20))


def test_draws_of_one_pass_are_successive_steps_over_the_same_rows() -> None:
    found, once = plan(draws_per_pass=3), plan()
    assert found.num_steps(2) == 3 * once.num_steps(2)
    for step in range(30):
        rows_of_step = found.micros_of(step)
        assert [row.draw for row in rows_of_step] == [step % 3] * 2
        visits = [(row.epoch, row.samples, row.counts) for row in rows_of_step]
        assert visits == [(row.epoch, row.samples, row.counts) for row in once.micros_of(step // 3)]


PARTS = [KEPT[:20], (), KEPT[20:45], KEPT[45:]]


def test_the_first_epoch_goes_through_the_parts_in_turn_and_later_ones_through_all() -> None:
    found = plan(PARTS)
    in_turn = [i for row in rows(found, found.num_steps(2)) if row.epoch == 0 for i in row.samples]
    bounds = [(0, 20), (20, 45), (45, 50)]
    assert [set(in_turn[a:b]) for a, b in bounds] == [{s.index for s in KEPT[a:b]} for a, b in bounds]
    assert in_turn != sorted(in_turn)
    later = [i for row in rows(found, found.num_steps(2)) if row.epoch == 1 for i in row.samples]
    assert (
        later == [i for row in rows(plan(), plan().num_steps(2)) if row.epoch == 1 for i in row.samples][: len(later)]
    )


def test_a_part_is_asked_for_when_its_first_row_is_and_the_whole_set_before_the_second_epoch() -> None:
    asked: list[int] = []
    whole: list[int] = []

    def kept_of(part: int) -> Sequence[KeptSample]:
        asked.append(part)
        return PARTS[part]

    settings = TrainSettings(input="in", output=("out",), target="t", max_tokens=100, num_anchors=40)
    found = RowPlan(len(PARTS), kept_of, settings, lambda: whole.append(len(asked)))
    last = 0
    assert not found.is_known(0)
    while (row := found.micros_of(last)[0]).epoch == 0:
        assert max(asked) == next(p for p, part in enumerate(PARTS) if row.samples[0] in {s.index for s in part})
        assert found.parts_reached(last + 1) == max(asked) + 1 and not whole
        assert found.is_known(last) and asked == sorted(set(asked))
        last += 1
    assert whole == [4] and found.parts_reached(last + 1) == 4


def test_rows_know_how_long_their_samples_are() -> None:
    assert all(row.lengths == tuple(LENGTHS[i] for i in row.samples) for row in rows(plan(PARTS), 30))


def test_passes_that_no_run_has_steps_for_are_refused_before_they_are_counted() -> None:
    with pytest.raises(RecipeError, match=r"--num-epochs 99,999,999 would take about [0-9,]+ steps.*--num-steps"):
        plan().num_steps(99_999_999)


def test_counting_that_takes_a_while_is_told_with_what_needs_none(caplog: pytest.LogCaptureFixture) -> None:
    full = (tuple(KeptSample(i, 100, 99) for i in range(1000)),)
    with caplog.at_level(logging.INFO):
        assert plan(full).num_steps(1000) == 500_000 and caplog.text == ""
        assert plan(full).num_steps(1001) == 500_500
    assert "--num-epochs 1,001" in caplog.text and "--num-steps" in caplog.text


@pytest.mark.parametrize("seed", range(30))
def test_rows_end_where_the_next_sample_would_be_too_much(seed: int) -> None:
    """As one sample after the other would find it, whatever the limits."""
    chance = random.Random(seed)
    sizes = [(chance.randint(1, 30), chance.randint(0, 12)) for _ in range(chance.randint(0, 40))]
    max_tokens, num_anchors = chance.randint(1, 80), chance.randint(1, 30)
    expected, tokens, anchors = [], 0, 0
    for place, (length, count) in enumerate(sizes):
        if place and (tokens + length > max_tokens or anchors + count > num_anchors):
            expected.append(place)
            tokens = anchors = 0
        tokens, anchors = tokens + length, anchors + count
    lengths, counts = np.array(sizes, dtype=np.int64).reshape(-1, 2).T
    found = Visits(np.arange(len(sizes)), lengths, counts).row_ends(max_tokens, num_anchors)
    assert found == ([*expected, len(sizes)] if sizes else [])


def test_steps_are_counted_as_they_are_packed() -> None:
    packed = plan(PARTS, rows_per_step=3)
    rows(packed, 200)
    for num_epochs in (1, 2, 5):
        assert plan(PARTS, rows_per_step=3).num_steps(num_epochs) == packed.num_steps(num_epochs)
