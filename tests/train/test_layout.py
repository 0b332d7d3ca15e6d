"""Which rank does what, and on which devices, follows from its number; what is not there to be had is refused."""

import pytest

torch = pytest.importorskip("torch")
from pydantic import ValidationError  # noqa: E402

from draftmill.contracts.errors import RecipeError  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.train.layout import Layout, Seat, cuda_numbers, devices_of, layout_of, meeting_rank  # noqa: E402
from draftmill.train.rows import PlannedRow  # noqa: E402

pytestmark = pytest.mark.torch

SPLITS = [Layout(d, t, is_split=True) for d in (1, 2, 3) for t in (1, 2, 3, 4)]
LAYOUTS = [*(Layout(n, n, is_split=False) for n in (1, 2, 3, 5)), *SPLITS]


def settings(**changed: object) -> TrainSettings:
    return TrainSettings(input="i", output=("o",), target="t", **changed)  # type: ignore[arg-type]


def rows(count: int) -> list[PlannedRow]:
    return [PlannedRow(0, (i,), (1,), (1,), index=i) for i in range(count)]


def test_rows_are_dealt_in_turn_to_both_sides() -> None:
    layout = Layout(num_drafters=2, num_targets=3, is_split=True)
    assert layout.world == 5
    assert [layout.drafter_of(row) for row in rows(6)] == [0, 1, 0, 1, 0, 1]
    assert [layout.target_of(row) for row in rows(6)] == [2, 3, 4, 2, 3, 4]
    assert layout.name(1) == "rank 1 (drafter 1)" and layout.name(3) == "rank 3 (target 1)"
    shared = Layout(2, 2, is_split=False)
    assert shared.world == 2
    assert [shared.target_of(row) for row in rows(4)] == [shared.drafter_of(row) for row in rows(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("layout", SPLITS, ids=str)
def test_pairs_are_all_that_rows_cross_between_in_the_order_of_the_rows(layout: Layout) -> None:
    met = dict.fromkeys((layout.target_of(row), layout.drafter_of(row)) for row in rows(100))
    assert layout.pairs() == list(met)


def test_a_world_that_was_not_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layout_of(settings()).world == 1
    assert layout_of(settings(ranks=3)).world == 3
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert layout_of(settings()) == Layout(4, 4, is_split=False)
    assert layout_of(settings(placement="split", target_ranks=3)) == Layout(1, 3, is_split=True)
    with pytest.raises(RecipeError, match="torchrun started 4 processes, but --placement split is of 2"):
        layout_of(settings(placement="split"))
    with pytest.raises(RecipeError, match="of 3"):
        layout_of(settings(ranks=3))


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK is 'first'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK 2 of WORLD_SIZE 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "x"}, "MASTER_PORT is 'x'"),
    ],
)
def test_a_launcher_that_says_half_of_it_is_named_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str], names: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=f"{names}.*torchrun"):
        layout_of(settings())
        meeting_rank()


def test_settings_of_another_placement_are_refused() -> None:
    for changed in ({"placement": "split", "ranks": 2}, {"target_ranks": 2}, {"drafter_ranks": 2}):
        with pytest.raises(ValidationError, match="placement"):
            settings(**changed)


def seats(layout: Layout, per_host: int) -> list[list[Seat]]:
    """The seats of every host, where each has room for so many ranks."""
    firsts = range(0, layout.world, per_host)
    hosts = [range(first, min(first + per_host, layout.world)) for first in firsts]
    return [[Seat(rank, rank - ranks[0], len(ranks)) for rank in ranks] for ranks in hosts]


@pytest.mark.parametrize("target_gpus", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_take_all_devices_of_their_host_in_turn_and_none_twice(layout: Layout, target_gpus: int) -> None:
    for per_host in range(1, layout.world + 1):
        for host in seats(layout, per_host):
            taken = [cuda_numbers(layout, target_gpus, seat, 99) for seat in host]
            held = [not layout.is_split or seat.rank >= layout.num_drafters for seat in host]
            assert [len(numbers) for numbers in taken] == [target_gpus if has_target else 1 for has_target in held]
            assert [number for numbers in taken for number in numbers] == list(range(sum(map(len, taken))))


def test_a_target_rank_takes_the_devices_behind_those_of_the_drafters_on_its_host() -> None:
    layout = Layout(num_drafters=2, num_targets=2, is_split=True)
    assert [list(cuda_numbers(layout, 2, seat, 6)) for seat in seats(layout, 4)[0]] == [[0], [1], [2, 3], [4, 5]]
    assert [list(cuda_numbers(layout, 2, seat, 4)) for seat in seats(layout, 2)[1]] == [[0, 1], [2, 3]]
    shared = Layout(2, 2, is_split=False)
    assert [list(cuda_numbers(shared, 3, seat, 6)) for seat in seats(shared, 2)[0]] == [[0, 1, 2], [3, 4, 5]]


def test_ranks_that_take_more_devices_than_there_are_are_refused_all_alike() -> None:
    layout = Layout(num_drafters=1, num_targets=2, is_split=True)
    for seat in seats(layout, 3)[0]:
        with pytest.raises(RecipeError, match=r"3 ranks of this host take 5 CUDA devices \(--target-gpus 2.*it has 4"):
            cuda_numbers(layout, 2, seat, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices")
def test_a_host_without_cuda_spreads_nothing() -> None:
    assert devices_of(settings(), Layout(1, 1, is_split=False)) == (torch.device("cpu"),)
    with pytest.raises(RecipeError, match="--target-gpus 2: torch finds no CUDA device"):
        devices_of(settings(target_gpus=2), Layout(1, 1, is_split=False))
    with pytest.raises(RecipeError, match="--device cuda: torch finds no CUDA device"):
        layout_of(settings(device="cuda"))


def test_a_target_is_not_spread_over_the_cpu() -> None:
    with pytest.raises(ValidationError, match="--target-gpus 2 counts CUDA devices, and --device cpu"):
        settings(target_gpus=2, device="cpu")
