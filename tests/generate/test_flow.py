"""However many prompts there are, few are alive at once; rows leave in any order; a failure stops all in good order."""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from completion_sets import check_parts, lost_in, records_of, rows_of
from draftmill.contracts.errors import StorageError
from draftmill.generate.desk import Desk, open_desk
from draftmill.generate.flow import ServedFlow
from draftmill.generate.intake import Intake
from draftmill.generate.meter import Meter
from draftmill.generate.part import OpenPart
from draftmill.generate.plan import draw_up
from draftmill.generate.prompts import Prompt
from draftmill.serving.failures import AttemptsExhaustedError, FleetDownError, RequestRefusedError
from draftmill.serving.protocol import ChatAnswer, ChatRequest
from draftmill.settings.generate import GenerateSettings
from tiny_tokenizer import write_tiny_tokenizer

IN_FLIGHT = 8


class CountingIntake(Intake):
    """Counts the prompts it has given out."""

    given = 0

    def units(self, span: Any) -> Any:
        for unit in super().units(span):
            self.given += isinstance(unit, Prompt)
            yield unit


class HandMadeFleet:
    """Answers after as many turns of the loop as `delay` says, or raises what it gives; counts what is alive."""

    max_in_flight = IN_FLIGHT

    def __init__(self, delay: Callable[[str], int | Exception]) -> None:
        self.delay = delay
        self.started = self.in_flight = self.most = self.most_ahead = 0
        self.intake: CountingIntake | None = None

    async def ask(self, request: ChatRequest) -> ChatAnswer:
        self.started += 1
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        assert self.intake is not None
        self.most_ahead = max(self.most_ahead, self.intake.given - self.started)
        outcome = self.delay(request.messages[-1]["content"])
        try:
            for _ in range(outcome if isinstance(outcome, int) else 1):
                await asyncio.sleep(0)
        finally:
            self.in_flight -= 1
        if isinstance(outcome, Exception):
            raise outcome
        return ChatAnswer(
            content="an answer",
            reasoning=None,
            tool_calls=None,
            finish_reason="stop",
            prompt_token_ids=None,
            token_ids=None,
            prompt_tokens=None,
            completion_tokens=2,
        )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("target"))


def settings(folder: Path, tokenizer: Path, num_rows: int, part_rows: int) -> GenerateSettings:
    rows = [{"id": f"r{n}", "prompt": f"prompt {n}"} for n in range(num_rows)]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return GenerateSettings(
        input=(str(folder / "p.jsonl"),),
        output=(str(folder / "out"),),
        target="t",
        tokenizer=str(tokenizer),
        endpoint=("http://nobody/v1",),
        spool=str(folder / "spool"),
        part_rows=part_rows,
    )


def answer(desk: Desk, fleet: HandMadeFleet, close: Callable[[OpenPart], None] | None = None) -> None:
    left = desk.left()
    total = sum(part.num_prompts for part in left)
    meter = Meter(total, tuple)
    fleet.intake = CountingIntake(desk.blueprint.survey, desk.blueprint.reading)
    flow = ServedFlow(desk.blueprint.manner, fleet.intake, meter, close or desk.close)
    asyncio.run(flow.answer(desk.open_parts(left, meter), fleet, total))  # type: ignore[arg-type]


def test_of_many_prompts_few_are_alive_at_once(tokenizer: Path, tmp_path: Path) -> None:
    """Row 17: prompts are read as they are asked, not before."""
    rng = random.Random(1)
    fleet = HandMadeFleet(lambda _: rng.randrange(5))
    with open_desk(draw_up(settings(tmp_path, tokenizer, 1000, 50))) as desk:
        answer(desk, fleet)
    assert fleet.most == IN_FLIGHT and fleet.most_ahead <= 1
    assert len(rows_of(tmp_path / "out")) == 1000
    check_parts(tmp_path / "out")


def test_the_first_prompt_may_be_the_last_to_be_answered(tokenizer: Path, tmp_path: Path) -> None:
    """Row 18: what is done is on disk, and only the stuck part is open."""
    order: list[str] = []
    with open_desk(draw_up(settings(tmp_path, tokenizer, 60, 10))) as desk:

        def close(part: OpenPart) -> None:
            order.append(part.span.name)
            desk.close(part)

        answer(desk, HandMadeFleet(lambda text: 3000 if text == "prompt 0" else 0), close)
    assert order[-1] == "part-00000" and sorted(order) == [f"part-{n:05d}" for n in range(6)]
    assert [row["id"] for row in rows_of(tmp_path / "out")] == [f"r{n}" for n in range(60)]


def test_failures_of_a_row_cost_that_row(tokenizer: Path, tmp_path: Path) -> None:
    failures = {
        "prompt 3": RequestRefusedError(400, "no"),
        "prompt 14": AttemptsExhaustedError({"timeout": 2}, "http://e: timeout"),
    }
    with open_desk(draw_up(settings(tmp_path, tokenizer, 20, 10))) as desk:
        answer(desk, HandMadeFleet(lambda text: failures.get(text, 1)))
    assert [(row["id"], row["reason"]) for row in lost_in(tmp_path / "out", "failed")] == [
        ("r3", "refused with HTTP 400"),
        ("r14", "given up after repeated failures"),
    ]
    assert "timeout 2 x" in lost_in(tmp_path / "out", "failed")[1]["detail"]
    check_parts(tmp_path / "out")


@pytest.mark.parametrize("where", ["fleet", "publishing"])
def test_a_failure_of_the_run_stops_it_with_what_is_done_saved(where: str, tokenizer: Path, tmp_path: Path) -> None:
    chosen = settings(tmp_path, tokenizer, 60, 10)
    down = FleetDownError("no engine answers any more")
    kinds = {"fleet": FleetDownError, "publishing": StorageError}
    with open_desk(draw_up(chosen)) as desk:

        def close(part: OpenPart) -> None:
            if where == "publishing" and part.span.name == "part-00002":
                raise StorageError("the store is gone")
            desk.close(part)

        with pytest.raises(kinds[where]):
            answer(desk, HandMadeFleet(lambda text: down if where == "fleet" and text == "prompt 25" else 1), close)
    made = len(records_of(tmp_path / "out"))
    assert 1 <= made < 6
    check_parts(tmp_path / "out")
    with open_desk(draw_up(chosen)) as desk:
        fleet = HandMadeFleet(lambda _: 1)
        answer(desk, fleet)
    # What was in flight when the run stopped is asked again, and nothing else.
    assert fleet.started <= 60 - 10 * made + (10 if where == "publishing" else 0)
    assert fleet.started <= 60 - 25 + IN_FLIGHT
    assert [row["id"] for row in rows_of(tmp_path / "out")] == [f"r{n}" for n in range(60)]
    check_parts(tmp_path / "out")
