"""The JSON of a chat turn, written so that vLLM and SGLang read the same, and read from either.

What differs: reasoning comes as `reasoning_content` (SGLang) or `reasoning` (vLLM since vllm-project/vllm#27755), and
some vLLM versions read only one of the two in the history (vllm-project/vllm#38488), so both are sent. Token ids are
asked for with `return_token_ids`; vLLM gives those of the prompt beside the choices, SGLang inside the choice
(sgl-project/sglang#30917). Template switches go to the top level of the body (sgl-project/sglang#20573).
"""

import json
from typing import Any

import msgspec

from draftmill.serving.protocol import ChatAnswer, ChatRequest

ASKS_TOKEN_IDS = {"return_token_ids": True}
_SHOWN_CHARS = 500
_WORD_CHARS = 80
_MOST_NESTED = 100
"""Lists and objects in one another that a tool call may hold: JSON libraries give up at about ten times that."""
_PLAIN_KEYS = ("role", "content", "name", "tool_call_id")


class BadAnswerError(ValueError):
    """A body that is no chat answer."""


def chat_body(model: str, request: ChatRequest, *, asks_token_ids: bool) -> bytes:
    """The body of a chat completions request; UnicodeEncodeError for a lone surrogate in it."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(message) for message in request.messages],
        **request.sampling.explicit(request.max_tokens),
        "n": 1,
        "stream": False,
    }
    if request.tools:
        body["tools"] = request.tools
    if request.template_kwargs:
        body["chat_template_kwargs"] = request.template_kwargs
    if asks_token_ids:
        body |= ASKS_TOKEN_IDS
    return msgspec.json.encode(body)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """What an engine knows of a message."""
    sent = {key: message[key] for key in _PLAIN_KEYS if key in message}
    if (reasoning := message.get("reasoning_content")) is not None:
        sent["reasoning_content"] = sent["reasoning"] = reasoning
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [_tool_call(call) for call in calls]
    return sent


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its arguments as text: engines refuse the mapping that chat templates want, and parse the text."""
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    arguments = msgspec.json.encode(function.get("arguments") or {}).decode()
    return {**call, "function": {**function, "arguments": arguments}}


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None
    usage: _Usage | None = None


_DECODER = msgspec.json.Decoder(_Answer)


def read_answer(body: bytes) -> ChatAnswer:
    """The answer a body holds, in whichever dialect; BadAnswerError where it holds none."""
    answer = _decoded(body)
    if not answer.choices:
        raise BadAnswerError(f"no choice in it: {readable(body)}")
    choice = answer.choices[0]
    said, usage = choice.message, answer.usage or _Usage()
    if not _is_flat(said.tool_calls, _MOST_NESTED):
        raise BadAnswerError(f"tool calls nested deeper than {_MOST_NESTED}: {readable(body)}")
    return ChatAnswer(
        content=said.content,
        reasoning=_reasoning(said),
        tool_calls=said.tool_calls or None,
        finish_reason=_word(choice.finish_reason) or "unknown",
        # An empty list says that the engine knows none: there is no prompt, and no answer, of no token.
        prompt_token_ids=answer.prompt_token_ids or choice.prompt_token_ids or None,
        token_ids=choice.token_ids or None,
        prompt_tokens=_count(usage.prompt_tokens),
        completion_tokens=_count(usage.completion_tokens),
    )


def _word(given: str | None) -> str:
    """A short text that can be counted by and printed, whatever the engine put there."""
    return (given or "")[:_WORD_CHARS].encode(errors="replace").decode()


def _count(given: int | None) -> int | None:
    return None if given is None or given < 0 else given


def _is_flat(value: Any, most: int) -> bool:
    """Whether no more than so many lists and objects lie in one another."""
    if isinstance(value, dict):
        value = list(value.values())
    return not isinstance(value, list) or (most > 0 and all(_is_flat(item, most - 1) for item in value))


def _reasoning(said: _Message) -> str | None:
    """The spelling that says something: some vLLM versions fill both."""
    given = [text for text in (said.reasoning_content, said.reasoning) if text is not None]
    return max(given, key=len, default=None)


def _decoded(body: bytes) -> _Answer:
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            # The standard library reads lone surrogates, which msgspec refuses: they are the target's own answer,
            # and asking again would bring the same one.
            return msgspec.convert(json.loads(body), _Answer)
        except (ValueError, RecursionError, msgspec.ValidationError):
            raise BadAnswerError(f"{error}: {readable(body)}") from error


def readable(body: bytes) -> str:
    """The engine's message (OpenAI's form, vLLM's, SGLang's or FastAPI's), or the start of whatever it sent."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = None
    if isinstance(said, dict):
        inner = said["error"] if isinstance(said.get("error"), dict) else said
        for key in ("message", "detail", "error"):
            if inner.get(key):
                return str(inner[key])[:_SHOWN_CHARS]
    return body[:_SHOWN_CHARS].decode(errors="replace").strip() or "(nothing)"
