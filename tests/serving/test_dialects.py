"""A chat body has everything where both engines look for it, and an answer is read in either's spelling."""

import json
from typing import Any

import msgspec
import pytest

from draftmill.serving.dialects import BadAnswerError, chat_body, read_answer
from draftmill.serving.protocol import GREEDY, ChatRequest, Sampling

USER = {"role": "user", "content": "2 + 2?"}


def sent(asks_token_ids: bool = True, **fields: Any) -> dict[str, Any]:
    request = ChatRequest(**{"messages": [USER], "max_tokens": 7, "sampling": GREEDY, **fields})
    return json.loads(chat_body("m", request, asks_token_ids=asks_token_ids))


def answered(message: dict[str, Any], choice: dict[str, Any] | None = None, **top: Any) -> bytes:
    choices = [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop", **(choice or {})}]
    return json.dumps({"id": "x", "object": "chat.completion", "choices": choices, "model": "m", **top}).encode()


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_every_sampling_value_is_sent_and_nothing_is_nested() -> None:
    sampling = Sampling(
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        min_p=0.1,
        presence_penalty=1.5,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        seed=5,
    )
    body = sent(sampling=sampling, template_kwargs={"enable_thinking": False})
    assert body == {
        "model": "m",
        "messages": [USER],
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.1,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 5,
        "max_tokens": 7,
        "n": 1,
        "stream": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "return_token_ids": True,
    }


def test_top_k_that_is_off_is_written_as_both_engines_take_it() -> None:
    assert sent()["top_k"] == -1


def test_what_is_not_wanted_is_left_out() -> None:
    assert not {"tools", "chat_template_kwargs", "return_token_ids"} & sent(asks_token_ids=False, tools=[]).keys()
    assert sent(tools=[{"type": "function"}])["tools"] == [{"type": "function"}]


def test_history_has_reasoning_in_both_spellings_and_no_ids() -> None:
    said = {"role": "assistant", "content": "4", "reasoning_content": "easy", "token_ids": [1], "prompt_token_ids": [2]}
    assert sent(messages=[USER, said, USER])["messages"][1] == {
        "role": "assistant",
        "content": "4",
        "reasoning_content": "easy",
        "reasoning": "easy",
    }


def test_tool_calls_are_sent_with_their_arguments_as_text() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": "ü"}}}
    as_text = {**call, "function": {"name": "add", "arguments": '{"b":2,"a":"ü"}'}}
    for given in (call, as_text):
        said = {"role": "assistant", "content": None, "tool_calls": [given]}
        told = {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "add"}
        assert sent(messages=[USER, said, told])["messages"][1:] == [{**said, "tool_calls": [as_text]}, told]


@pytest.mark.parametrize(
    ("message", "reasoning"),
    [
        ({"content": "4", "reasoning_content": "easy"}, "easy"),
        ({"content": "4", "reasoning": "easy"}, "easy"),
        ({"content": "4", "reasoning": "easy", "reasoning_content": None}, "easy"),
        ({"content": "4", "reasoning": "", "reasoning_content": "easy"}, "easy"),
        ({"content": "4", "reasoning": "easy", "reasoning_content": ""}, "easy"),
        ({"content": "4", "reasoning": ""}, ""),
        ({"content": "4"}, None),
    ],
)
def test_reasoning_is_read_in_either_spelling(message: dict[str, Any], reasoning: str | None) -> None:
    answer = read_answer(answered(message))
    assert (answer.content, answer.reasoning) == ("4", reasoning)


def test_token_ids_are_read_where_either_engine_puts_them() -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, "prompt_tokens_details": None}
    vllm = read_answer(answered({"content": "4"}, {"token_ids": [4, 5, 6]}, prompt_token_ids=[1, 2], usage=usage))
    sglang = read_answer(answered({"content": "4"}, {"token_ids": [4, 5, 6], "prompt_token_ids": [1, 2]}, usage=usage))
    assert vllm == sglang
    assert (vllm.prompt_token_ids, vllm.token_ids) == ([1, 2], [4, 5, 6])
    assert (vllm.prompt_tokens, vllm.completion_tokens) == (2, 3)
    bare = read_answer(answered({"content": None}, {"finish_reason": "length"}))
    assert (bare.content, bare.token_ids, bare.prompt_token_ids, bare.prompt_tokens) == (None, None, None, None)
    assert bare.finish_reason == "length"


def test_half_an_emoji_is_an_answer_like_any_other() -> None:
    assert read_answer(answered({"content": "\ud83d!"})).content == "\ud83d!"


def test_what_makes_no_sense_is_taken_for_not_given() -> None:
    odd = {"token_ids": [], "finish_reason": "\ud800" * 1000}
    answer = read_answer(answered({"content": "4"}, odd, prompt_token_ids=[], usage={"completion_tokens": -7}))
    assert (answer.token_ids, answer.prompt_token_ids, answer.completion_tokens) == (None, None, None)
    assert answer.finish_reason == "?" * 80


def test_half_an_emoji_is_not_sent() -> None:
    with pytest.raises(UnicodeEncodeError):
        sent(messages=[{"role": "user", "content": "\ud83d"}])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>bad gateway</html>", "bad gateway"),
        (b"", "nothing"),
        (answered({"content": "four"})[:-30], "four"),
        (b'{"object": "error", "message": "engine is dead"}', "engine is dead"),
        (b'{"choices": []}', "no choice"),
        (answered({"content": ["parts"]}), r"Expected `str"),
        (msgspec.json.encode({"choices": [{"message": None}]}), r"Expected `object"),
        (b'{"x": ' + nested(50_000) + b"}", "recursion depth"),
        (b'{"choices": [{"message": {"tool_calls": [{"a": ' + nested(200) + b"}]}}]}", "nested deeper than 100"),
    ],
)
def test_a_body_that_is_no_answer_is_told_in_the_engines_words(body: bytes, words: str) -> None:
    with pytest.raises(BadAnswerError, match=words):
        read_answer(body)
