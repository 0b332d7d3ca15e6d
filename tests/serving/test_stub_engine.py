"""The stub answers as real engines do: the same for the same prompt, with ids that are its text's, in each dialect."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from draftmill.chat.chat import open_chat
from draftmill.serving.dialects import chat_body, read_answer
from draftmill.serving.protocol import GREEDY, ChatAnswer, ChatRequest
from serving.stub_engine import StubEngine, read_faults, started_stub
from tiny_tokenizer import write_tiny_tokenizer


def request(text: str, max_tokens: int = 1000, **fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": text}]
    return ChatRequest(**{"messages": messages, "max_tokens": max_tokens, "sampling": GREEDY, **fields})


def ask(stub: StubEngine, *requests: ChatRequest) -> list[ChatAnswer]:
    async def asking() -> list[ChatAnswer]:
        async with stub.serving() as url, aiohttp.ClientSession() as session:
            return [await _asked(session, url, one) for one in requests]

    return asyncio.run(asking())


async def _asked(session: aiohttp.ClientSession, url: str, one: ChatRequest) -> ChatAnswer:
    async with session.post(f"{url}/chat/completions", data=chat_body("stub", one, asks_token_ids=True)) as answer:
        assert answer.status == 200, await answer.text()
        return read_answer(await answer.read())


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("thinks", [True, False])
def test_answers_are_the_templates_and_tokenizers_own(tmp_path: Path, dialect: Any, thinks: bool) -> None:
    folder = write_tiny_tokenizer(tmp_path, thinking=True)
    chat = open_chat(folder)
    one = request("2 + 2?", template_kwargs={"enable_thinking": thinks})
    first, again = ask(StubEngine(tokenizer=folder, dialect=dialect), one, one)
    assert first == again
    rendered = chat.render(one.messages, add_generation_prompt=True, enable_thinking=thinks)
    assert first.prompt_token_ids == chat.encode(rendered)
    assert first.token_ids is not None and first.token_ids[-1] in chat.stop_ids
    text = f"{first.reasoning}</think>{first.content}" if thinks else first.content
    assert text == chat.decode(first.token_ids[:-1])
    assert first.token_ids[:-1] == chat.encode(str(text))
    assert (first.reasoning is not None) == thinks
    assert first.prompt_tokens == len(first.prompt_token_ids)
    assert first.completion_tokens == len(first.token_ids)


def test_prompts_differ_in_their_answers_and_max_tokens_cuts() -> None:
    whole, other, cut = ask(StubEngine(), request("a"), request("b"), request("a", 9))
    assert whole.content != other.content
    assert whole.token_ids is not None and cut.token_ids == whole.token_ids[:9]
    assert (whole.finish_reason, cut.finish_reason) == ("stop", "length")


def test_commands_are_read_in_order() -> None:
    found = read_faults("do [[429 after=1.5 x1]] and [[stall=2]] [[503 date=3 x2]] [[reset]]")
    assert [(f.name, f.seconds, f.form, f.times) for f in found] == [
        ("429", 1.5, "after", 1),
        ("stall", 2.0, None, None),
        ("503", 3.0, "date", 2),
        ("reset", 0.0, None, None),
    ]


def test_a_process_of_its_own_does_the_same() -> None:
    async def story() -> tuple[ChatAnswer, int | None]:
        flags = ("--answer-tokens", "2000", "--keeps-bodies", "--die-after", "2")
        async with started_stub(*flags) as stub, aiohttp.ClientSession() as session:
            answer = await _asked(session, stub.url, request("a", 4000))
            async with session.get(stub.url.replace("/v1", "/stub/asked")) as asked:
                assert [body["max_tokens"] for body in json.loads(await asked.read())] == [4000]
            with pytest.raises(aiohttp.ClientError):
                await _asked(session, stub.url, request("b"))
            return answer, await stub.process.wait()

    answer, code = asyncio.run(story())
    assert (answer, code) == (ask(StubEngine(answer_tokens=2000), request("a", 4000))[0], 1)
    assert answer.completion_tokens is not None and 1900 < answer.completion_tokens < 2100
