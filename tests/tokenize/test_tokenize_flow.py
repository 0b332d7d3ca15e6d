"""Parts made side by side end as if made in order, one after the other, by one run; what is there is never mixed up."""

import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import completions
from completions import row, write_rows
from draftmill.contracts.errors import RecipeError, StorageError
from draftmill.settings.tokenize import TokenizeSettings
from draftmill.storage.patience import Patience
from draftmill.storage.sets import open_set_writer
from draftmill.storage.store import open_store
from draftmill.storage.transfer import Transfers
from draftmill.tokenize.budget import Budget
from draftmill.tokenize.flow import Flow, Stages
from draftmill.tokenize.inputs import Inputs
from draftmill.tokenize.making import WORKER_BYTES, fitting, make_missing
from draftmill.tokenize.plan import draw_up
from draftmill.tokenize.pool import open_pool
from draftmill.tokenize.run import run
from storage.unruly_proxy import GONE, WELL_BEHAVED, UnrulyProxy
from tiny_tokenizer import write_tiny_tokenizer

LENIENT = {"max_spike_frac": 1, "max_duplicate_frac": 1, "max_dropped_frac": 1}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    write_tiny_tokenizer(tmp_path / "tokenizer")
    return tmp_path


def _settings(place: Path, output: str = "samples", **changes: Any) -> TokenizeSettings:
    given = {"output": (str(place / output),), **LENIENT, **changes}
    return completions.settings(place, place / "in", place / "tokenizer", **given)


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != "card.json"}


def _write_inputs(place: Path) -> None:
    """Four files, whose rows repeat ids inside and over files, some of them unreadable."""
    for number in range(4):
        rows: list[dict[str, Any] | bytes] = [row(i, id=f"{number}-{i}") for i in range(12)]
        rows[3] = b'{"torn'
        rows[5] = row(5, id=f"{number}-4")
        rows[7] = row(7, id=f"{(number + 3) % 4}-2")  # of the file before; of the first file: of the last
        write_rows(place / "in" / f"{number}.jsonl", rows)


@pytest.mark.parametrize("workers", [1, 2])
def test_ids_repeat_over_parts_as_they_do_inside_one(place: Path, workers: int):
    _write_inputs(place)
    whole = run(_settings(place, "whole"))["content"]
    cut = run(_settings(place, "cut", part_bytes=900, workers=workers))["content"]
    assert len(whole["parts"]) == 1 and len(cut["parts"]) > 8
    assert [d["line"] for d in whole["dropped_rows"]] == [4, 6, 4, 6, 8, 4, 6, 8, 3, 4, 6, 8]
    for key in ("dropped", "dropped_rows", "rows", "rows_in", "tokens", "samples", "duplicate_samples"):
        assert whole[key] == cut[key], key
    named = {part["file"] for part in cut["parts"]}
    assert named == {f.name for f in (place / "cut").glob("*.arrow")} and any("-once" in name for name in named)


def test_every_state_that_a_kill_can_leave_ends_in_the_same_bytes(place: Path):
    _write_inputs(place)
    settings = _settings(place, part_bytes=900)
    run(settings)
    folder = place / "samples"
    whole, card = _files(folder), json.loads((folder / "card.json").read_bytes())["content_hash"]
    arrows = sorted(name for name in whole if name.endswith(".arrow"))
    harms = [
        [arrows[0], "part-00000.json", "part-00000.rows"],  # nothing of the part
        ["part-00001.json"],  # data and rows, no record
        [arrows[2], "part-00002.json"],  # rows and record of another life
        ["part-00003.rows", "part-00005.json"],  # all but what later parts must know
        [*arrows, *(f"part-{i:05d}.json" for i in range(len(arrows)))],
    ]
    for harm in harms:
        for name in ["card.json", *harm]:
            (folder / name).unlink()
        assert run(settings)["content_hash"] == card
        assert _files(folder) == whole
    for name, harmed in ((arrows[1], b"cut"), ("part-00002.rows", b"garbage"), ("state.json", b"{")):
        (folder / name).write_bytes(harmed)
        for lost in ("card.json", "part-00004.json"):
            (folder / lost).unlink()
        assert run(settings)["content_hash"] == card
        assert _files(folder) == whole


def test_a_finished_part_is_there_for_readers_while_later_ones_are_made(place: Path):
    _write_inputs(place)
    settings = _settings(place, part_bytes=900)
    blueprint = draw_up(settings)
    writer = open_set_writer(settings.output, blueprint.plan)
    first, waited = place / "samples" / "part-00000.json", asyncio.Event()

    async def work() -> None:
        transfers = Transfers(Patience(1))
        async with open_pool(blueprint.rows, 1, 1 << 30) as pool:
            (place / "spool").mkdir()
            inputs = Inputs(blueprint.source, place / "inputs", transfers)

            class LastWaits:
                """A worker that makes the last part only when the first can be read."""

                async def make(self, job: Any, on_read: Any) -> Any:
                    if job.name == blueprint.parts[-1].name:
                        while not first.exists():
                            await asyncio.sleep(0.01)
                        waited.set()
                    return await pool.make(job, on_read)

                async def close(self) -> None:
                    pass

            stages = Stages(inputs, LastWaits(), transfers, place / "spool", Budget(1 << 20), lambda read, rows: None)
            await Flow(writer, stages, lambda part: True, lambda record: None).run(blueprint.parts)

    asyncio.run(work())
    assert waited.is_set() and len(writer.records()) == len(blueprint.parts)


def test_inputs_that_change_between_plan_and_reading_are_refused_by_name(place: Path):
    _write_inputs(place)
    settings = _settings(place, part_bytes=900)
    blueprint = draw_up(settings)
    writer = open_set_writer(settings.output, blueprint.plan)
    write_rows(place / "in" / "2.jsonl", [row(1, id="new")])
    with pytest.raises(StorageError, match=r"2\.jsonl was changed after it was listed"):
        asyncio.run(make_missing(writer, blueprint))


def test_no_more_workers_are_started_than_memory_and_parts_allow(place: Path):
    settings = _settings(place, workers=64, worker_growth_bytes=1 << 30)
    assert fitting(settings, num_parts=100, free_bytes=1 << 40) == (64, 1 << 30)
    assert fitting(settings, num_parts=3, free_bytes=1 << 40) == (3, 1 << 30)
    assert fitting(settings, num_parts=100, free_bytes=10 * WORKER_BYTES) == (10, WORKER_BYTES)
    assert fitting(settings, num_parts=100, free_bytes=0) == (1, WORKER_BYTES)


RUN = """
import sys
from draftmill.cli import main
sys.exit(main(["tokenize", *sys.argv[1:]]))
"""


def _started(place: Path, limit: Callable[[], None] | None = None, **flags: Any) -> "subprocess.Popen[str]":
    given = {"input": place / "in", "output": place / "raced", "tokenizer": place / "tokenizer", **LENIENT, **flags}
    words = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    )


def test_two_runs_of_one_plan_side_by_side_make_one_set(place: Path):
    _write_inputs(place)
    runs = [_started(place, part_bytes=900, workers=workers) for workers in (1, 2)]
    ended = [(process.communicate()[1], process.returncode) for process in runs]
    assert [code for _, code in ended] == [0, 0], ended
    run(_settings(place, "alone", part_bytes=900))
    assert _files(place / "raced") == _files(place / "alone")


def test_of_two_plans_for_one_output_just_one_is_made(place: Path):
    _write_inputs(place)
    runs = [_started(place, part_bytes=900, max_tokens=max_tokens) for max_tokens in (1000, 20)]
    ended = [(*process.communicate(), process.returncode) for process in runs]
    codes = [code for *_, code in ended]
    assert sorted(code == 0 for code in codes) == [False, True], ended
    loser = ended[1 if codes[0] == 0 else 0]
    assert (
        "already holds another tokenize set: max_tokens was" in loser[1] or "has been taken over by a run" in loser[1]
    )
    run(_settings(place, "alone", part_bytes=900, max_tokens=(1000, 20)[codes.index(0)]))
    assert _files(place / "raced") == _files(place / "alone")


def test_an_output_inside_the_input_is_refused(place: Path):
    _write_inputs(place)
    for output in ("in", "in/samples"):
        with pytest.raises(RecipeError, match=rf"--output .*{output} lies in the input"):
            run(_settings(place, output))
    one = completions.settings(
        place, place / "in" / "0.jsonl", place / "tokenizer", output=(str(place / "in" / "samples"),), **LENIENT
    )
    assert run(one)["content"]["rows_in"] == 12, "a single file's folder is not read"


def test_one_output_named_twice_is_one(place: Path):
    _write_inputs(place)
    twice = (str(place / "samples"), f"{place}/in/../samples/")
    run(_settings(place, part_bytes=900).model_copy(update={"output": twice}))
    run(_settings(place, "alone", part_bytes=900))
    assert _files(place / "samples") == _files(place / "alone")


def test_an_output_that_is_removed_meanwhile_is_named(place: Path):
    _write_inputs(place)
    settings = _settings(place, part_bytes=900)
    blueprint = draw_up(settings)
    writer = open_set_writer(settings.output, blueprint.plan)
    (place / "samples" / "plan.json").unlink()
    with pytest.raises(StorageError, match=r"plan\.json was removed while this run was under way"):
        asyncio.run(make_missing(writer, blueprint))


def test_interrupted_while_its_store_is_gone_it_ends_at_once_and_goes_on_later(place: Path, lake: UnrulyProxy):
    _write_inputs(place)
    flags = {"output": f"{lake.url}/out", "part_bytes": 900, "workers": 2}
    waiting = _started(place, **flags)
    while not any("part-" in path for _, path in lake.requests):
        time.sleep(0.01)
    lake.faults = GONE
    time.sleep(1)
    family = psutil.Process(waiting.pid).children(recursive=True)
    waiting.terminate()  # Ctrl-C does the same, but a job in the background ignores it
    told = waiting.communicate(timeout=20)[1]
    assert waiting.returncode == 130 and "run the same command again to go on" in told
    assert family and psutil.wait_procs(family, timeout=10)[1] == []

    lake.faults = WELL_BEHAVED
    assert _started(place, **flags).wait(60) == 0
    run(_settings(place, "alone", part_bytes=900))
    there = open_store(f"{lake.url}/out")
    assert {file.key: there.get(file.key) for file in there.files() if file.key != "card.json"} == _files(
        place / "alone"
    )


def test_a_full_disk_is_named_and_the_next_run_goes_on(place: Path):
    _write_inputs(place)

    def limit() -> None:  # on the size of files: it stands for a disk without room
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))

    full = _started(place, limit, part_bytes=100_000, workers=1)
    told = full.communicate()[1]
    assert full.returncode == 1 and "cannot be written: File too large; free some space and run the same" in told, told
    assert "Traceback" not in told
    assert _started(place, part_bytes=100_000).wait(60) == 0
    run(_settings(place, "alone", part_bytes=100_000))
    assert _files(place / "raced") == _files(place / "alone")


def test_what_a_kill_left_in_one_of_two_outputs_only_is_made_whole_in_both(place: Path):
    _write_inputs(place)
    both = _settings(place, "one", part_bytes=900).model_copy(
        update={"output": (str(place / "one"), str(place / "two"))}
    )
    run(both)
    whole = _files(place / "one")
    for lost in ("card.json", "part-00001.rows", "part-00001.json", "../one/part-00001.json", "../one/card.json"):
        (place / "two" / lost).unlink()
    run(both)
    assert _files(place / "one") == _files(place / "two") == whole
