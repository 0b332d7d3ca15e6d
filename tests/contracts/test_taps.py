"""Promise: default taps are those of the published checkpoints, and ids no engine could serve are refused."""

import pytest

from draftmill.contracts.errors import RecipeError
from draftmill.contracts.taps import check_tap_ids, chosen_tap_ids, default_tap_ids


@pytest.mark.parametrize(
    ("num_layers", "tap_ids"),
    [
        (28, (1, 7, 13, 19, 25)),
        (32, (1, 8, 15, 22, 29)),
        (36, (1, 9, 17, 25, 33)),
        (48, (1, 12, 23, 34, 45)),
        (64, (1, 16, 31, 46, 61)),
    ],
)
def test_five_default_taps_are_the_published_ones(num_layers: int, tap_ids: tuple[int, ...]) -> None:
    assert default_tap_ids(num_layers, 5) == tap_ids


def test_one_tap_reads_the_middle() -> None:
    assert default_tap_ids(30, 1) == (15,)


@pytest.mark.parametrize("num_layers", [6, 7])
def test_too_many_taps_name_the_largest_number_that_fits(num_layers: int) -> None:
    with pytest.raises(RecipeError, match=r"--num-taps to at most (3|4)"):
        default_tap_ids(num_layers, 5)


def test_the_last_layer_is_refused_with_the_reason() -> None:
    assert check_tap_ids([3, 11, 19, 27, 30], 32) == (3, 11, 19, 27, 30)
    with pytest.raises(RecipeError, match="before the final norm"):
        check_tap_ids([3, 11, 19, 27, 31], 32)


@pytest.mark.parametrize("tap_ids", [[], [3, 3], [5, 2], [-1, 4], [2, 99]])
def test_repeated_unordered_and_foreign_ids_are_refused(tap_ids: list[int]) -> None:
    with pytest.raises(RecipeError):
        check_tap_ids(tap_ids, 32)


def test_named_ids_win_over_a_number_of_them() -> None:
    assert chosen_tap_ids((3, 5), 5, 32) == (3, 5)
    assert chosen_tap_ids((), 5, 32) == default_tap_ids(32, 5)
    with pytest.raises(RecipeError, match="before the final norm"):
        chosen_tap_ids((3, 31), 5, 32)
