"""The client returns answers in order, or an error that holds the engine's own words; it never hangs."""

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from draftmill.contracts.errors import ServingError
from draftmill.serving.client import CompletionClient
from draftmill.serving.protocol import GREEDY, Choice
from serving.fake_engine import STOP_ID, FakeEngine, echo, letter


def ask(engine: FakeEngine, prompts: list[list[int]], timeout_s: float = 20.0) -> list[Choice]:
    async def asking() -> list[Choice]:
        async with engine.serving() as url, aiohttp.ClientSession() as session:
            return await CompletionClient(session, url, "tiny", timeout_s).complete(prompts, GREEDY, 5)

    return asyncio.run(asking())


def test_answers_come_in_the_order_of_the_prompts() -> None:
    def shuffled(asked: dict[str, Any]) -> web.StreamResponse:
        choices = [
            {"index": i, "text": "", "finish_reason": "length", "token_ids": [p[0]], "logprobs": None}
            for i, p in enumerate(asked["prompt"])
        ]
        usage = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4, "prompt_tokens_details": None}
        return web.json_response({"id": "cmpl-1", "created": 1, "choices": choices[::-1], "usage": usage})

    answers = ask(FakeEngine(shuffled), [[1, 2], [3]])
    assert [a.token_ids for a in answers] == [[1], [3]]


def test_every_sampling_value_is_sent() -> None:
    engine = FakeEngine()
    assert ask(engine, [[4, 9]])[0].token_ids == [letter([4, 9]), STOP_ID]
    assert engine.asked == [
        {
            "model": "tiny",
            "prompt": [[4, 9]],
            "return_token_ids": True,
            "max_tokens": 5,
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "seed": None,
        }
    ]


def refuse(status: int, text: str) -> FakeEngine:
    return FakeEngine(lambda _asked: web.Response(status=status, text=text))


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (refuse(400, '{"error": {"message": "window exceeded"}}'), "HTTP 400: window exceeded"),
        (refuse(500, "Traceback: out of memory"), "HTTP 500: Traceback: out of memory"),
        (refuse(503, ""), "HTTP 503"),
        (refuse(200, "<html>not an engine"), "no completion .*<html>not an engine"),
        (refuse(200, '{"choices": 3}'), "no completion"),
    ],
)
def test_a_failure_is_told_in_the_engines_words(engine: FakeEngine, words: str) -> None:
    with pytest.raises(ServingError, match=words):
        ask(engine, [[1]])
    assert len(engine.asked) == 1


def test_a_cut_connection_and_a_silent_engine_are_errors() -> None:
    def cut(_asked: dict[str, Any]) -> web.StreamResponse:
        raise ConnectionAbortedError

    with pytest.raises(ServingError, match="cannot be asked"):
        ask(FakeEngine(cut), [[1]])
    with pytest.raises(ServingError, match="no answer within"):
        ask(FakeEngine(delay_s=5.0), [[1]], timeout_s=0.2)


def test_answers_that_do_not_match_the_prompts_are_refused() -> None:
    def one_for_all(asked: dict[str, Any]) -> web.StreamResponse:
        return echo({"prompt": asked["prompt"][:1]})

    with pytest.raises(ServingError, match="answered 1 of 2 prompts"):
        ask(FakeEngine(one_for_all), [[1], [2]])
