"""Batches are fixed before they are asked, parts come out whole whoever answers, and a dead engine is named."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from completion_sets import check_parts, lost_in, records_of, rows_of
from draftmill.contracts.errors import ServingError
from draftmill.generate.batches import BatchFlow, cut_batches
from draftmill.generate.desk import Desk, open_desk
from draftmill.generate.intake import Intake
from draftmill.generate.meter import Meter
from draftmill.generate.part import OpenPart
from draftmill.generate.plan import draw_up
from draftmill.serving.process import EngineProcess, running
from draftmill.settings.generate import GenerateSettings
from tiny import write_tiny_tokenizer

FAKE = [sys.executable, str(Path(__file__).parents[1] / "serving" / "fake_engine.py")]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("target"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 150}))
    return folder


def settings(target: Path, folder: Path, lengths: Sequence[int], **changes: Any) -> GenerateSettings:
    """Prompts of these lengths, no two alike."""
    rows = [{"id": f"r{n}", "prompt": chr(97 + n) * length} for n, length in enumerate(lengths)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    given = {
        "input": (str(folder / "p.jsonl"),),
        "output": (str(folder / "out"),),
        "target": str(target),
        "spool": str(folder / "spool"),
        "max_new_tokens": 4,
        "batch_rows": 3,
        "part_rows": 5,
    }
    return GenerateSettings(**{**given, **changes})


def answer(chosen: GenerateSettings, num_engines: int, *, kill: bool = False) -> None:
    with open_desk(draw_up(chosen)) as desk:
        run_flow(desk, num_engines, close=desk.close, kill=kill)


def run_flow(desk: Desk, num_engines: int, *, close: Callable[[OpenPart], None], kill: bool = False) -> None:
    async def story() -> None:
        async with running([FAKE] * num_engines) as engines:
            if kill:
                kill_one(engines)
            left, blueprint = desk.left(), desk.blueprint
            parts = desk.open_parts(left, Meter(sum(part.num_prompts for part in left), tuple))
            intake = Intake(blueprint.survey, blueprint.reading)
            await BatchFlow(blueprint.manner, intake, close).answer(parts, engines)

    asyncio.run(story())


def kill_one(engines: list[EngineProcess]) -> None:
    os.kill(engines[-1].process.pid, signal.SIGKILL)


def part_files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / "out").glob("p*")}


def test_prompts_of_like_length_share_a_batch(target: Path, tmp_path: Path) -> None:
    with open_desk(draw_up(settings(target, tmp_path, [9, 2, 50, 2, 30]))) as desk:
        (part, _) = desk.open_parts(desk.left(), Meter(5, tuple))
        intake = Intake(desk.blueprint.survey, desk.blueprint.reading)
        batches = cut_batches(part.conversations(intake, desk.blueprint.manner), 2)
    assert [[talk.prompt.id for talk in batch] for batch in batches] == [["r1", "r3"], ["r0", "r4"], ["r2"]]


def test_parts_are_the_same_with_one_engine_and_with_two(target: Path, tmp_path: Path) -> None:
    made = []
    for num_engines in (1, 2):
        folder = tmp_path / str(num_engines)
        answer(settings(target, folder, [n % 7 + 1 for n in range(20)]), num_engines)
        check_parts(folder / "out")
        made.append(part_files(folder))
    assert [record["rows"] for record in records_of(tmp_path / "1" / "out")] == [5, 5, 5, 5, 0]
    assert made[0] == made[1]
    assert [row["id"] for row in rows_of(tmp_path / "1" / "out")] == [f"r{n}" for n in range(20)]


def test_a_record_counts_every_row(target: Path, tmp_path: Path) -> None:
    answer(settings(target, tmp_path, [3, 200, 5], part_rows=9), 1)
    (record,) = records_of(tmp_path / "out")
    assert (record["rows_in"], record["rows"], record["tokens"]) == (4, 2, 4)
    assert [(d["line"], d["reason"]) for d in lost_in(tmp_path / "out", "dropped")] == [
        (2, "prompt too long for the target's window"),
        (4, "broken JSON"),
    ]
    assert (record["stats"]["finish_reasons"], record["stats"]["lengths"]) == ({"stop": 2}, {"2": 2})


def test_a_batch_that_was_saved_by_half_is_asked_again_whole(target: Path, tmp_path: Path) -> None:
    whole, broken = (settings(target, tmp_path / name, [1, 2, 3]) for name in ("whole", "broken"))
    with open_desk(draw_up(broken)) as desk:
        spooled = desk.spool.file("part-00000")
    with open_desk(draw_up(whole)) as desk:
        answered = desk.spool.file("part-00000")
        closed: list[bytes] = []
        run_flow(desk, 1, close=lambda part: closed.append(answered.path.read_bytes()))
        # As a run leaves it that ends after the second line of its batch, in the middle of the third.
        spooled.path.write_bytes(closed[0][: closed[0].rindex(b"\n", 0, -1) + 20])
    answer(whole, 1)
    answer(broken, 1)
    check_parts(tmp_path / "broken" / "out")
    assert part_files(tmp_path / "broken") == part_files(tmp_path / "whole")


def test_a_dead_engine_is_an_error_that_names_it(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"engine 2 of 2 was ended by SIGKILL(.|\n)*Run the same command again"):
        answer(settings(target, tmp_path, [1, 2, 3, 4] * 5), 2, kill=True)
