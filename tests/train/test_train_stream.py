"""A run on a set that is still being made is, bit for bit, the run on the finished one, wherever it is cut in two."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
from draftmill.chat.chat import open_chat
from draftmill.contracts.errors import DataGateError, RecipeError, StorageError
from draftmill.settings.train import TrainSettings
from draftmill.storage.waiting import StalledError
from draftmill.train.data import open_input, read_data
from draftmill.train.run import run
from sample_sets import GivenSample, Producer
from small_run import small_settings
from tiny import write_tiny_target

pytestmark = pytest.mark.torch

NUM_PARTS, NUM_SAMPLES, MASK_ID = 5, 15, 270
rng = np.random.default_rng(1)
SAMPLES: list[GivenSample] = [
    (f"s{i}", rng.integers(0, 256, n).tolist(), [t >= n // 3 for t in range(n)])
    for i, n in enumerate(rng.integers(15, 60, NUM_SAMPLES).tolist())
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    write_tiny_target(folder / "target", num_layers=4, hidden_size=32)
    return folder / "target"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def settings(target: Path, samples: Path | str, output: Path, **changed: object) -> TrainSettings:
    chosen = {"rows_per_step": 1, "num_steps": 16, "save_every": 5, "keep_checkpoints": 9, "stall_timeout_s": 60}
    there = small_settings(target.parent, output, **{**chosen, **changed}).model_dump()
    return TrainSettings(**{**there, "input": str(samples), "target": str(target)})


def producer(target: Path, place: Path | str) -> Producer:
    return Producer(place, SAMPLES, open_chat(target).tokenizer_hash, NUM_PARTS)


def weights(output: Path) -> dict[str, bytes]:
    found = output.glob("checkpoints/*/*.safetensors")
    return {str(path.relative_to(output)): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def undisturbed(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the finished set: all of its first epoch, and some of its second."""
    place = tmp_path_factory.mktemp("undisturbed")
    producer(target, place / "samples").finish()
    run(settings(target, place / "samples", place / "run"))
    return place / "run"


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
    first_of_part_2 = first_step_of(short, 2, making)
    assert steps_in(tmp_path / "run")[-1] == first_of_part_2, "what was trained so far is kept, to the last step"
    making.finish()
    behind = tmp_path / "samples" / "part-00001.arrow"
    behind.rename(tmp_path / behind.name)  # lies behind the position: is not read again before the second epoch
    with pytest.raises(StorageError, match=r"part-00001\.arrow is missing"):
        run(settings(target, tmp_path / "samples", tmp_path / "run"))
    assert steps_in(tmp_path / "run")[-1] > first_of_part_2
    (tmp_path / behind.name).rename(behind)
    run(settings(target, tmp_path / "samples", tmp_path / "run"))
    expected, found = weights(undisturbed), weights(tmp_path / "run")
    assert {name: data for name, data in found.items() if name in expected} == expected


def steps_in(output: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    return sorted(int(path.name[-8:]) for path in (output / "checkpoints").iterdir())


def first_step_of(chosen: TrainSettings, part: int, making: Producer) -> int:
    """The first step that reads from a part."""
    making.publish(part)
    data = read_data(chosen, open_input(chosen), Path(chosen.target))
    return next(step for step in range(chosen.num_steps or 0) if data.rows.parts_reached(step + 1) == part + 1)


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
    with pytest.raises(RecipeError, match=r"from the second epoch on .* data_cache_bytes .*for one epoch; checkpoints"):
        run(narrow)
    assert sum(path.stat().st_size for path in (cache / "parts").rglob("*") if path.is_file()) <= 2 * size
    run(settings(target, s3_url, tmp_path / "run"))
    expected = weights(undisturbed)
    assert {name: data for name, data in weights(tmp_path / "run").items() if name in expected} == expected
