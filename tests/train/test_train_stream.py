"""A run on a set that is still being made is, bit for bit, the run on the finished one, wherever it is cut in two."""

import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
from draftmill.chat.chat import open_chat
from draftmill.contracts.errors import DataGateError, RecipeError, StorageError
from draftmill.storage.waiting import StalledError
from draftmill.train.data import open_input
from draftmill.train.run import run
from sample_sets import Producer
from small_stream import (
    NUM_PARTS,
    NUM_SAMPLES,
    SAMPLES,
    first_step_of,
    producer,
    run_on_the_finished_set,
    steps_in,
    weights,
)
from small_stream import stream_settings as settings
from tiny import write_tiny_target

pytestmark = pytest.mark.torch

MASK_ID = 270


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    write_tiny_target(folder / "target", num_layers=4, hidden_size=32)
    return folder / "target"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def undisturbed(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_on_the_finished_set(target, tmp_path_factory.mktemp("undisturbed"))


def test_a_run_that_starts_before_the_first_part_is_the_run_on_the_finished_set(
    target: Path, undisturbed: Path, tmp_path: Path
) -> None:
    making = producer(target, tmp_path / "samples")

    def make() -> None:
        for part in (3, 0, 4, 2, 1):
            time.sleep(0.2)
            making.publish(part)
        making.finish()

    thread = threading.Thread(target=make)
    thread.start()
    card = run(settings(target, tmp_path / "samples", tmp_path / "run"))
    thread.join()
    assert weights(tmp_path / "run") == weights(undisturbed)
    assert card["content"]["rows"] == NUM_SAMPLES and len(card["content"]["input_parts"]) == NUM_PARTS
    assert (tmp_path / "run" / "plan.json").read_bytes() == (undisturbed / "plan.json").read_bytes()


def test_a_maker_that_stops_leaves_a_checkpoint_and_the_rerun_on_the_finished_set_goes_on_from_it(
    target: Path, undisturbed: Path, tmp_path: Path
) -> None:
    making = producer(target, tmp_path / "samples")
    making.publish(0, 1, 3)
    short = settings(target, tmp_path / "samples", tmp_path / "run", stall_timeout_s=0.3)
    with pytest.raises(StalledError, match=r"part-00002 of .* is awaited .*3 of 5 parts are there"):
        run(short)
    making.publish(2)
    first_of_part_2 = first_step_of(short, 2)
    assert steps_in(tmp_path / "run")[-1] == first_of_part_2, "what was trained so far is kept, to the last step"
    making.finish()
    behind = tmp_path / "samples" / "part-00001.arrow"
    behind.rename(tmp_path / behind.name)  # lies behind the position: is not read again before the second epoch
    with pytest.raises(StorageError, match=r"part-00001\.arrow is missing"):
        run(settings(target, tmp_path / "samples", tmp_path / "run"))
    assert steps_in(tmp_path / "run")[-1] == num_lines(tmp_path / "run") > first_of_part_2
    (tmp_path / behind.name).rename(behind)
    run(settings(target, tmp_path / "samples", tmp_path / "run"))
    expected, found = weights(undisturbed), weights(tmp_path / "run")
    assert {name: data for name, data in found.items() if name in expected} == expected


def num_lines(output: Path) -> int:
    """The steps that a run has told of."""
    return len((output / "metrics.jsonl").read_text().splitlines())


def test_a_part_that_the_gate_refuses_stops_the_run_and_is_named(target: Path, tmp_path: Path) -> None:
    spoilt = [*SAMPLES[:6], *((name, [MASK_ID, *ids[1:]], mask) for name, ids, mask in SAMPLES[6:9]), *SAMPLES[9:]]
    Producer(tmp_path / "samples", spoilt, open_chat(target).tokenizer_hash, NUM_PARTS).publish(0, 1, 2)
    with pytest.raises(DataGateError, match=r"none of 3 samples of part-00002\.arrow .*holds the mask token: 3"):
        run(settings(target, tmp_path / "samples", tmp_path / "run", mask_id=MASK_ID))
    assert steps_in(tmp_path / "run")[-1] > 0


def test_a_dry_run_tells_what_is_there_of_an_unfinished_set(target: Path, tmp_path: Path) -> None:
    producer(target, tmp_path / "samples").publish(0, 1, 3)
    shown = run(settings(target, tmp_path / "samples", tmp_path / "run", dry_run=True))
    assert (shown["inputs"]["parts"], shown["inputs"]["planned_parts"], shown["inputs"]["samples"]) == (2, 5, 6)


def test_a_set_in_a_store_is_trained_on_through_a_cache_of_two_parts_for_one_epoch_only(
    target: Path, tmp_path: Path, cache: Path, undisturbed: Path, s3_url: str
) -> None:
    producer(target, s3_url).finish()
    size = max(file.size for file in open_input(settings(target, s3_url, tmp_path)).store.files())
    narrow = settings(target, s3_url, tmp_path / "run", data_cache_bytes=2 * size)
    with pytest.raises(
        RecipeError, match=r"from the second epoch on .* --data-cache-bytes .*for one epoch; checkpoints"
    ):
        run(narrow)
    assert sum(path.stat().st_size for path in (cache / "parts").rglob("*") if path.is_file()) <= 2 * size
    run(settings(target, s3_url, tmp_path / "run"))
    expected = weights(undisturbed)
    assert {name: data for name, data in weights(tmp_path / "run").items() if name in expected} == expected
