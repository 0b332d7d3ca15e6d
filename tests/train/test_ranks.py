"""Figures of ranks add up, and time is shared out by who has it; a rank alone takes everything."""

import pytest

torch = pytest.importorskip("torch")

from draftmill.contracts.errors import RecipeError  # noqa: E402
from draftmill.train.metrics import StepSums  # noqa: E402
from draftmill.train.ranks import alone  # noqa: E402
from draftmill.train.roles import telling_of_full_devices  # noqa: E402
from draftmill.train.rows import PlannedRow  # noqa: E402

pytestmark = pytest.mark.torch


def rows(count: int) -> list[PlannedRow]:
    return [PlannedRow(0, (i,), (1,), (1,), index=i) for i in range(count)]


def test_a_rank_alone_takes_every_row_and_adds_nothing() -> None:
    ranks = alone(torch.device("cpu"))
    assert ranks.own(rows(3)) == rows(3)
    assert ranks.is_writer and ranks.has_target and ranks.has_drafter and ranks.is_first_target
    assert ranks.tell("card") == "card"
    sums = StepSums.empty(3)
    assert ranks.add_figures(sums) == sums
    assert ranks.share_files({"a": b"b"}) == {"a": b"b"}


def test_a_full_device_is_this_ranks_own_fault_and_told_with_what_helps() -> None:
    ranks = alone(torch.device("cpu"))
    said = pytest.raises(RecipeError, match=r"rank 0 of 1: cpu is full \(CUDA out of memory.*lower --max-tokens")
    with said, telling_of_full_devices(ranks), ranks.talking("gradients are added up"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")


def test_time_is_shared_out_by_who_has_it() -> None:
    sums = StepSums.empty(1)
    sums.wall_s = 10.0
    sums.seconds |= {"target": 3.0, "drafter": 5.0, "optimizer": 1.0, "waiting": 0.5}
    assert (sums.frac("target"), sums.frac("drafter"), sums.frac("waiting")) == (0.3, 0.5, 0.05)
    # Two drafter ranks, whose step took 7 s, and three target ranks that took 21 s together from row to row.
    apart = StepSums.empty(1)
    apart.ranks, apart.target_ranks, apart.wall_s, apart.span_s = 2, 3, 7.0, 21.0
    apart.seconds |= {"target": 10.5, "held": 0.0, "drafter": 8.0, "optimizer": 2.0, "waiting": 4.0}
    assert (apart.frac("target"), apart.frac("waiting")) == (0.5, pytest.approx(2 / 7))
    assert apart.balance()["grow"] == "target" and "more target ranks would help" in apart.note()
    apart.seconds |= {"waiting": 0.0, "held": 12.0}
    assert apart.balance()["grow"] == "drafter"
    apart.seconds["held"] = 0.0
    assert apart.balance()["grow"] is None


def test_a_target_that_has_read_ahead_is_never_busier_than_its_own_time() -> None:
    ahead = StepSums.empty(1)
    ahead.target_ranks, ahead.wall_s, ahead.span_s = 1, 2.0, 5.0  # five seconds of reading for a step of two
    ahead.seconds |= {"target": 5.0, "drafter": 1.0}
    assert (ahead.frac("target"), ahead.frac("drafter")) == (1.0, 0.5)
    assert "target busy 100%  drafter busy 50%" in ahead.note()
    ahead.span_s = ahead.seconds["target"] = 0.0  # another draw from states that are there
    assert "target busy" not in ahead.note() and "drafter busy 50%" in ahead.note()
