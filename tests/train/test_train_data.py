"""A set whose length is not known yet is not trained on for a number of epochs: the number of steps has to be named."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
from draftmill.contracts.errors import EXIT_REFUSED, EXIT_USAGE, DataGateError, RecipeError, StorageError
from draftmill.settings.train import TrainSettings
from draftmill.train.data import open_input
from sample_sets import Producer, write_samples

pytestmark = pytest.mark.torch


def settings(folder: Path, **changed: object) -> TrainSettings:
    return TrainSettings(input=str(folder), output=("out",), target="t", **changed)  # type: ignore[arg-type]


def test_an_unfinished_set_needs_a_number_of_steps(tmp_path: Path) -> None:
    write_samples(tmp_path, [("a", [1, 2, 3], [True] * 3)], "hash", num_parts=1)
    assert open_input(settings(tmp_path)).was_finished
    (tmp_path / "card.json").unlink()
    with pytest.raises(RecipeError, match="--num-epochs 6 would take; set --num-steps") as refused:
        open_input(settings(tmp_path))
    assert refused.value.exit_code == EXIT_USAGE
    assert not open_input(settings(tmp_path, num_steps=10)).was_finished


def test_which_tokens_an_unfinished_set_will_hold_is_not_asked(tmp_path: Path) -> None:
    Producer(tmp_path, [("a", [1, 2, 3], [True] * 3)], "hash", num_parts=1)
    with pytest.raises(RecipeError, match="set --loss-vocab all"):
        open_input(settings(tmp_path, num_steps=10, loss_vocab="seen"))


def test_a_set_that_its_gate_refused_is_told_as_that_and_not_as_unfinished(tmp_path: Path) -> None:
    making = Producer(tmp_path, [("a", [1, 2, 3], [True] * 3)], "hash", num_parts=1)
    making.refuse("87.0% of 100 samples have exactly 6 supervised tokens")
    for chosen in (settings(tmp_path), settings(tmp_path, num_steps=10)):
        with pytest.raises(DataGateError, match=r"gate of draftmill tokenize refused it: 87\.0% of 100") as refused:
            open_input(chosen)
        assert refused.value.exit_code == EXIT_REFUSED
    making.finish()
    assert open_input(settings(tmp_path)).was_finished


def test_a_folder_that_is_no_set_is_told_as_that(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"holds no plan\.json"):
        open_input(settings(tmp_path))


@pytest.mark.parametrize("several", [{"ranks": 2}, {"placement": "split"}, {}], ids=["shared", "split", "torchrun"])
def test_ranks_must_not_give_each_other_up_before_what_they_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: dict[str, object]
) -> None:
    making = Producer(tmp_path, [("a", [1, 2, 3], [True] * 3)], "hash", num_parts=1)
    hasty = {"num_steps": 10, "stall_timeout_s": 60, "rank_timeout_s": 60}
    open_input(settings(tmp_path, **hasty))  # a rank alone waits for no other
    if not several:
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match="--stall-timeout-s 60 is not less than --rank-timeout-s 60"):
        open_input(settings(tmp_path, **hasty, **several))
    open_input(settings(tmp_path, num_steps=10, **several))
    making.finish()
    open_input(settings(tmp_path, **hasty, **several))
