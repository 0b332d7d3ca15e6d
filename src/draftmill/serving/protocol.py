"""What is asked and answered: chat turns of any OpenAI-compatible engine, and batches of token ids of our own.

A chat turn is a `ChatRequest` and a `ChatAnswer` (dialects.py writes and reads their JSON). The in-process engine
speaks `POST /v1/completions` with token ids both ways, as vLLM does. Every sampling value is written out, because an
engine fills what a client leaves out from the model's own files (vllm-project/vllm#15241).
"""

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length"]

READY_PREFIX = "draftmill engine at "
"""How an engine that we start says, on a line of its stdout, that it is ready; its URL follows."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. `top_k` is switched off by -1: SGLang refuses 0, vLLM takes both."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int | None

    def explicit(self, max_tokens: int) -> dict[str, Any]:
        """Every value by name, as it is sent and as a row keeps it."""
        return {**msgspec.to_builtins(self), "max_tokens": max_tokens}


GREEDY = Sampling(
    temperature=0.0,
    top_p=1.0,
    top_k=-1,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    seed=None,
)


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn to answer. Messages hold role, content, and of an answer in the history its `reasoning_content` and
    `tool_calls`, whose arguments may be a mapping."""

    messages: list[dict[str, Any]]
    max_tokens: int
    sampling: Sampling
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One turn answered. Text is as the engine cut it, special tokens and reasoning tags mostly taken out;
    `token_ids` are what the model emitted, the end-of-turn id included when it stopped by itself."""

    content: str | None
    reasoning: str | None
    """From `reasoning_content` or `reasoning`; None where the answer has neither."""
    tool_calls: list[dict[str, Any]] | None
    finish_reason: str
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None
    prompt_tokens: int | None
    """As the engine counted them: another number than the local render's means that it read another conversation."""
    completion_tokens: int | None

    @property
    def num_tokens(self) -> int | None:
        """Tokens it has, by its ids or by the engine's count; None where the engine gives neither."""
        return self.completion_tokens if self.token_ids is None else len(self.token_ids)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `token_ids` ends with the stop token exactly when `finish_reason` is "stop"; `text` never does."""

    index: int
    text: str
    finish_reason: FinishReason
    token_ids: list[int]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens read and written by one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one request: a choice for each prompt, in order."""

    choices: list[Choice]
    usage: Usage
    model: str = ""
    object: str = "text_completion"


def request_body(model: str, prompts: list[list[int]], sampling: Sampling, max_tokens: int) -> bytes:
    """The JSON body of a completions request for a batch of prompts given as token ids."""
    return msgspec.json.encode(
        {"model": model, "prompt": prompts, "return_token_ids": True, **sampling.explicit(max_tokens)}
    )


def error_body(message: str, status: int) -> bytes:
    """The JSON body an engine refuses with, as OpenAI's servers write it."""
    return msgspec.json.encode({"error": {"message": message, "type": "invalid_request_error", "code": status}})
