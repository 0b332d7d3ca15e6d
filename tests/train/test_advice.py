"""What a run wastes is told with both numbers and what to set, and nothing is said where nothing is wasted."""

import logging
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.train.advice import advise, beyond_window, slow_dtype, uneven_rows  # noqa: E402
from draftmill.train.layout import Layout  # noqa: E402

pytestmark = pytest.mark.torch


def settings(**changed: object) -> TrainSettings:
    return TrainSettings(input="i", output=("o",), target="t", **changed)  # type: ignore[arg-type]


def shared(count: int) -> Layout:
    return Layout(count, count, is_split=False)


def told(rows: int, layout: Layout) -> str:
    return uneven_rows(settings(rows_per_step=rows), layout) or ""


def test_ranks_that_learn_from_nothing_are_told_with_what_to_set() -> None:
    assert told(1, shared(4)).startswith(
        "--rows-per-step 1 over 4 drafter ranks: a step leaves 3 of them without a row"
    )
    assert "set --rows-per-step 4 " in told(1, shared(4)) and told(1, shared(4)).endswith("or --ranks 1")
    assert "--drafter-ranks 3" in told(3, Layout(num_drafters=4, num_targets=2, is_split=True))


def test_under_torchrun_its_own_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("RANK", 0), ("WORLD_SIZE", 4)):
        monkeypatch.setenv(name, str(number))
    assert told(6, shared(4)).endswith("or torchrun's --nproc-per-node (over all its nodes) 3")
    assert told(3, Layout(num_drafters=4, num_targets=2, is_split=True)).endswith("or --drafter-ranks 3")


def test_rows_that_are_no_multiple_of_the_ranks_are_told() -> None:
    assert "a step has 2 rows for 2 of them and 1 for the others, which wait" in told(6, shared(4))
    assert "set --rows-per-step 8 " in told(6, shared(4)) and told(6, shared(4)).endswith("or --ranks 3")


@pytest.mark.parametrize(("rows", "ranks"), [(1, 1), (4, 4), (8, 4), (7, 1)])
def test_rows_that_are_dealt_evenly_are_no_matter(rows: int, ranks: int) -> None:
    assert told(rows, shared(ranks)) == ""
    assert told(rows, Layout(ranks, 9, is_split=True)) == ""


def test_samples_beyond_the_targets_window_are_told_of_where_there_may_be_some() -> None:
    told = beyond_window(settings(max_tokens=512), 511)
    assert told is not None and told.startswith("--max-tokens 512 lies above the target's window of 511 tokens")
    assert beyond_window(settings(max_tokens=512), 512) is beyond_window(settings(max_tokens=512), None) is None


@pytest.mark.parametrize(
    ("device", "chosen", "declared", "is_told"),
    [
        ("cuda", "float32", "bfloat16", True),
        ("cuda", "float32", "float16", True),
        ("cuda", "bfloat16", "bfloat16", False),
        ("cuda", "float32", "float32", False),
        ("cuda", "float32", None, False),
        ("cpu", "float32", "bfloat16", False),
    ],
)
def test_float32_on_cuda_is_told_where_the_target_is_served_in_half_of_it(
    device: str, chosen: str, declared: str | None, is_told: bool
) -> None:
    said = slow_dtype(settings(compute_dtype=chosen), device, declared)
    assert (said is not None) == is_told
    assert said is None or ("--compute-dtype bfloat16" in said and str(declared) in said)


@pytest.mark.parametrize("config", ['{"torch_dtype": "bfloat16"}', '{"text_config": {"dtype": "bfloat16"}}'])
def test_a_run_is_told_each_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with caplog.at_level(logging.WARNING):
        advise(settings(), shared(2), "cuda", tmp_path)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "--rows-per-step 1 over 2 drafter ranks" in caplog.text and "declares bfloat16" in caplog.text
