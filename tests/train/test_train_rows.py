"""Packing loses no sample, cuts no draw, and is a function of (seed, epoch, kept samples) alone."""

import random
from collections import Counter

from draftmill.settings.train import TrainSettings
from draftmill.train.gate import KeptSample
from draftmill.train.rows import PlannedRow, RowPlan

rng = random.Random(0)
KEPT = tuple(KeptSample(3 * i, length := rng.randint(2, 60), rng.randint(1, length - 1)) for i in range(50))
LENGTHS = {sample.index: sample.length for sample in KEPT}


def plan(**changed: int) -> RowPlan:
    settings = {"max_tokens": 100, "num_anchors": 40, "rows_per_step": 2, **changed}
    return RowPlan(KEPT, TrainSettings(input="in", output=("out",), target="t", **settings))  # type: ignore[arg-type]


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
