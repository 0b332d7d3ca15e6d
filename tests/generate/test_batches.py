"""Batches are fixed before they are asked, parts come out whole whoever answers, and a dead engine is named."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from draftmill.chat.chat import Chat, open_chat
from draftmill.contracts.cards import Dropped
from draftmill.contracts.errors import ServingError
from draftmill.contracts.rows import Row
from draftmill.generate.batches import Answering
from draftmill.generate.part import AnswerFigures, Limits, OpenPart, open_part
from draftmill.generate.prompts import Prompt, PromptPart, cut_turns
from draftmill.serving.process import EngineProcess, running
from tiny import write_tiny_tokenizer

FAKE = [sys.executable, str(Path(__file__).parents[1] / "serving" / "fake_engine.py")]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return open_chat(write_tiny_tokenizer(tmp_path_factory.mktemp("target")))


def limits(batch_rows: int = 3, max_prompt_tokens: int = 100) -> Limits:
    return Limits(max_prompt_tokens=max_prompt_tokens, max_new_tokens=4, batch_rows=batch_rows, keeps_cut=False)


def part_of(name: str, lengths: Sequence[int]) -> PromptPart:
    texts = ["x" * length for length in lengths]
    rows = [Row(id=f"{name}-{n}", messages=({"role": "user", "content": t},)) for n, t in enumerate(texts)]
    prompts = [Prompt(row, cut_turns(row.messages), "p.jsonl", n) for n, row in enumerate(rows, start=1)]
    return PromptPart(name, prompts, [Dropped(file="p.jsonl", line=0, id=None, reason="broken JSON")])


def test_prompts_of_like_length_share_a_batch_and_rows_keep_their_order(chat: Chat) -> None:
    part = open_part(part_of("part-00000", [9, 2, 50, 2, 30]), chat, limits(batch_rows=2))
    ids = [[c.prompt.row.id[-1] for c in batch] for batch in part.batches]
    assert ids == [["1", "3"], ["0", "4"], ["2"]]
    assert [c.prompt.row.id[-1] for c in part.conversations] == list("01234")


def answer_all(chat: Chat, parts: list[PromptPart], num_engines: int, kill: bool = False) -> list[OpenPart]:
    closed: list[OpenPart] = []
    advanced: list[int] = []

    async def story() -> None:
        async with running([FAKE] * num_engines) as engines:
            if kill:
                kill_one(engines)
            await Answering(chat, limits(), closed.append, advanced.append).answer(parts, engines, timeout_s=30.0)

    asyncio.run(story())
    assert sum(advanced) == sum(len(part.prompts) for part in parts)
    return closed


def kill_one(engines: list[EngineProcess]) -> None:
    os.kill(engines[-1].process.pid, signal.SIGKILL)


def test_parts_are_the_same_with_one_engine_and_with_two(chat: Chat) -> None:
    def written(num_engines: int) -> dict[str, bytes]:
        parts = [part_of(f"part-0000{n}", [n + 1, 5, 7, 3, 200]) for n in range(4)]
        return {p.source.name: p.record("plan", {})[1] for p in answer_all(chat, parts, num_engines)}

    one = written(1)
    assert [len(data.splitlines()) for data in one.values()] == [4] * 4
    assert one == written(2)


def test_a_record_counts_every_row(chat: Chat) -> None:
    (part,) = answer_all(chat, [part_of("part-00000", [3, 200, 5])], 1)
    record, data = part.record("plan", {})
    assert (record.rows_in, record.rows, record.tokens, record.bytes) == (4, 2, 4, len(data))
    assert [(d.line, d.reason) for d in record.dropped] == [
        (0, "broken JSON"),
        (2, "prompt too long for the target's window"),
    ]
    assert record.stats["finish_reasons"] == {"stop": 2}
    assert record.stats["lengths"] == {"2": 2}


def test_a_part_of_which_nothing_can_be_asked_is_closed_too(chat: Chat) -> None:
    (part,) = answer_all(chat, [part_of("part-00000", [200])], 1)
    assert part.record("plan", {})[0].rows == 0


def test_a_dead_engine_is_an_error_that_names_it(chat: Chat) -> None:
    with pytest.raises(ServingError, match=r"engine 2 of 2 was ended by SIGKILL(.|\n)*Run the same command again"):
        answer_all(chat, [part_of(f"part-0000{n}", [1, 2, 3]) for n in range(3)], 2, kill=True)


def test_lengths_are_quantiles_of_all_answers() -> None:
    figures = AnswerFigures.read(
        {"prompt_tokens": 0, "completion_tokens": 0, "finish_reasons": {}, "lengths": {"3": 50, "10": 45, "90": 5}}
    )
    assert (figures.length_at(0.5), figures.length_at(0.95), figures.length_at(1.0)) == (3, 10, 90)
    doubled = (figures + figures).as_content()["lengths"]
    assert doubled == {"p50": 3, "p95": 10, "max": 90}
    assert AnswerFigures().length_at(0.5) == 0
