"""Which rank does what is a function of the row's number; figures of ranks add up; who was not asked for is refused."""

import pytest

torch = pytest.importorskip("torch")
from pydantic import ValidationError  # noqa: E402

from draftmill.contracts.errors import RecipeError  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.train.metrics import StepSums  # noqa: E402
from draftmill.train.ranks import Layout, alone, layout_of  # noqa: E402
from draftmill.train.rows import PlannedRow  # noqa: E402

pytestmark = pytest.mark.torch


def settings(**changed: object) -> TrainSettings:
    return TrainSettings(input="i", output=("o",), target="t", **changed)  # type: ignore[arg-type]


def rows(count: int) -> list[PlannedRow]:
    return [PlannedRow(0, (i,), (1,), index=i) for i in range(count)]


def test_rows_are_dealt_in_turn_to_both_sides() -> None:
    layout = Layout(num_drafters=2, num_targets=3, is_split=True)
    assert layout.world == 5
    assert [layout.drafter_of(row) for row in rows(6)] == [0, 1, 0, 1, 0, 1]
    assert [layout.target_of(row) for row in rows(6)] == [2, 3, 4, 2, 3, 4]
    assert layout.name(1) == "rank 1 (drafter 1)" and layout.name(3) == "rank 3 (target 1)"
    shared = Layout(2, 2, is_split=False)
    assert shared.world == 2
    assert [shared.target_of(row) for row in rows(4)] == [shared.drafter_of(row) for row in rows(4)] == [0, 1, 0, 1]


def test_a_rank_alone_takes_every_row_and_adds_nothing() -> None:
    ranks = alone(torch.device("cpu"))
    assert ranks.own(rows(3)) == rows(3)
    assert ranks.is_writer and ranks.has_target and ranks.has_drafter and ranks.is_first_target
    assert ranks.tell("card") == "card"
    sums = StepSums.empty(3)
    assert ranks.add_figures(sums) == sums
    assert ranks.share_files({"a": b"b"}) == {"a": b"b"}


def test_a_world_that_was_not_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layout_of(settings()).world == 1
    assert layout_of(settings(ranks=3)).world == 3
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert layout_of(settings()) == Layout(4, 4, is_split=False)
    assert layout_of(settings(placement="split", target_ranks=3)) == Layout(1, 3, is_split=True)
    with pytest.raises(RecipeError, match="torchrun started 4 processes, but placement split is of 2"):
        layout_of(settings(placement="split"))
    with pytest.raises(RecipeError, match="of 3"):
        layout_of(settings(ranks=3))


def test_settings_of_another_placement_are_refused() -> None:
    for changed in ({"placement": "split", "ranks": 2}, {"target_ranks": 2}, {"drafter_ranks": 2}):
        with pytest.raises(ValidationError, match="placement"):
            settings(**changed)


def test_time_is_shared_out_by_who_has_it() -> None:
    sums = StepSums.empty(1)
    sums.seconds |= {"target": 3.0, "drafter": 5.0, "optimizer": 1.0, "waiting": 1.0}
    assert (sums.frac("target"), sums.frac("drafter"), sums.wall_s) == (0.3, 0.5, 10.0)
    # Two drafter ranks and three target ranks: the step took the drafters 7 s each.
    apart = StepSums.empty(1)
    apart.ranks, apart.target_ranks = 2, 3
    apart.seconds |= {"target": 10.5, "held": 0.0, "drafter": 8.0, "optimizer": 2.0, "waiting": 4.0}
    assert (apart.wall_s, apart.frac("target"), apart.frac("waiting")) == (7.0, 0.5, pytest.approx(2 / 7))
    assert apart.balance()["grow"] == "target" and "more target ranks would help" in apart.note()
    apart.seconds |= {"waiting": 0.0, "held": 12.0}
    assert apart.balance()["grow"] == "drafter"
    apart.seconds["held"] = 0.0
    assert apart.balance()["grow"] is None
