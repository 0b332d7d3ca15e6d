"""Both sides of placement split know which rows cross, in which order and how long; what arrives is what was read."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import islice, product
from threading import Barrier

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from draftmill.train.features import DocumentStates, Toll  # noqa: E402
from draftmill.train.layout import Layout  # noqa: E402
from draftmill.train.ranks import Ranks, alone  # noqa: E402
from draftmill.train.rows import PlannedRow  # noqa: E402
from draftmill.train.samples import Sample  # noqa: E402
from draftmill.train.transit import Arriving, Outbox, Traffic, joined_states, meet  # noqa: E402

pytestmark = pytest.mark.torch

ROWS_PER_STEP, DRAWS, NUM_STEPS, NUM_KNOWN = 3, 4, 12, 6
LENGTHS = (5, 7, 2, 9, 4, 6)


def micros_of(step: int) -> list[PlannedRow]:
    """Rows of two samples, each visited in four steps running."""
    group, draw = divmod(step, DRAWS)
    numbers = range(group * ROWS_PER_STEP, (group + 1) * ROWS_PER_STEP)
    return [
        PlannedRow(group, (m % 6, (m + 1) % 6), (LENGTHS[m % 6], LENGTHS[(m + 1) % 6]), (1, 1), draw, m)
        for m in numbers
    ]


def traffic(first_step: int = 0, draws: int = DRAWS) -> Traffic:
    return Traffic(
        micros_of, lambda step: step < NUM_KNOWN, first_step, NUM_STEPS, draws, width=8, dtype=torch.bfloat16
    )


def indices(rows: Iterable[PlannedRow]) -> list[int]:
    return [row.index for row in rows]


def all_rows(of: Traffic) -> list[PlannedRow]:
    return [row for row in replace(of, is_known=lambda step: True).known_rows() if row is not None]


def test_a_row_crosses_once_for_all_its_draws() -> None:
    assert indices(all_rows(traffic())) == list(range(9))
    assert all(row.draw == 0 for row in all_rows(traffic()))


def test_a_run_that_goes_on_between_draws_has_the_rows_cross_again() -> None:
    rows = all_rows(traffic(first_step=6))
    assert indices(rows) == list(range(3, 9)) and [row.draw for row in rows] == [2, 2, 2, 0, 0, 0]


def test_who_looks_ahead_waits_for_no_row_that_is_not_planned_yet() -> None:
    rows = traffic().known_rows()
    assert indices(row for row in islice(rows, 6) if row is not None) == list(range(6))
    assert [next(rows), next(rows)] == [None, None]


def test_sizes_follow_from_the_plan() -> None:
    row = micros_of(0)[1]
    assert (traffic().num_tokens(row), traffic().num_bytes(row)) == (7 + 2, (7 + 2) * 8 * 2)


@pytest.mark.parametrize("has_last", [True, False])
@pytest.mark.parametrize("lengths", [(4,), (3, 5)])
def test_states_arrive_as_they_were_read(lengths: Sequence[int], has_last: bool) -> None:
    documents = [Sample(f"s{i}", np.zeros(n, np.int64), np.ones(n, np.bool_)) for i, n in enumerate(lengths)]
    states = [DocumentStates(torch.randn(n, 6), torch.randn(n, 2) if has_last else None) for n in lengths]
    toll = Toll(1.0, 2.0, 3.0, 4)
    arrived = Arriving(lambda: (joined_states(states), toll), num_features=6).read(documents)
    assert arrived.toll == toll
    for read, sent in zip(arrived.documents, states, strict=True):
        assert torch.equal(read.features_TF, sent.features_TF)
        if sent.last_TH is None or read.last_TH is None:
            assert sent.last_TH is read.last_TH
        else:
            assert torch.equal(read.last_TH, sent.last_TH)


@pytest.mark.parametrize("fault", ["dtype", "width", "length"])
def test_states_that_the_other_side_makes_no_room_for_are_never_sent(fault: str) -> None:
    row, cpu = micros_of(0)[1], torch.device("cpu")
    states_TW = {
        "dtype": torch.zeros(9, 8),
        "width": torch.zeros(9, 6, dtype=torch.bfloat16),
        "length": torch.zeros(8, 8, dtype=torch.bfloat16),
    }[fault]
    outbox = Outbox(alone(cpu), traffic(), 1 << 20, timedelta(seconds=1))
    with pytest.raises(AssertionError, match=r"instead of \(9, 8, torch\.bfloat16\)"):
        outbox.send(row, states_TW, 0.0)


class Posted:
    """What has been posted, and is taken when the other side says so."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.is_taken = tensor, False

    def is_completed(self) -> bool:
        return self.is_taken

    def wait(self, _timeout: timedelta) -> None:
        self.is_taken = True


class Posting(Ranks):
    """A target rank whose backend tells of what was taken, as NCCL does."""

    def __init__(self) -> None:
        super().__init__(Layout(1, 1, is_split=True), 1, (torch.device("cpu"),), None)
        self.posted: list[Posted] = []

    def post(self, tensor: torch.Tensor, to: int) -> Posted:
        self.posted.append(Posted(tensor))
        return self.posted[-1]


def test_states_that_were_taken_are_on_their_way_no_longer() -> None:
    ranks, row = Posting(), micros_of(0)[1]
    states_TW = torch.zeros(9, 8, dtype=torch.bfloat16)
    outbox = Outbox(ranks, traffic(), 1 << 20, timedelta(seconds=1))
    in_flight = []
    for is_quick in (True, True, False, False, False):
        outbox.send(row, states_TW, 0.0)
        states, told = ranks.posted[-2:]
        states.is_taken = is_quick
        in_flight.append(told.tensor[2].item() / states_TW.nbytes)
    assert in_flight == [1, 1, 1, 2, 3]


class Hesitant(Ranks):
    """A rank that is joined to another as by NCCL: each of the two waits until the other has come."""

    def __init__(self, layout: Layout, rank: int, doors: dict[tuple[int, int], Barrier]) -> None:
        super().__init__(layout, rank, (torch.device("cpu"),), None)
        self.doors = doors
        self.met: list[tuple[int, int]] = []

    def greet(self, source: int, to: int) -> None:
        self.doors[source, to].wait(timeout=5)
        self.met.append((source, to))


@pytest.mark.parametrize(("num_drafters", "num_targets"), [(1, 1), (1, 3), (2, 2), (2, 3), (3, 2), (2, 4)])
def test_all_ranks_that_rows_cross_between_meet_though_each_waits_for_the_other(
    num_drafters: int, num_targets: int
) -> None:
    layout = Layout(num_drafters, num_targets, is_split=True)
    doors = {pair: Barrier(2) for pair in product(range(num_drafters, layout.world), range(num_drafters))}
    ranks = [Hesitant(layout, rank, doors) for rank in range(layout.world)]
    with ThreadPoolExecutor(layout.world) as pool:
        list(pool.map(meet, ranks))
    rows = [row for step in range(NUM_STEPS) for row in micros_of(step)]
    crossed = {(layout.target_of(row), layout.drafter_of(row)) for row in rows}
    for rank in ranks:
        assert sorted(rank.met) == sorted(pair for pair in crossed if rank.rank in pair)
