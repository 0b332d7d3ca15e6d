"""What goes over the wire: `POST /v1/completions` with token ids both ways, as vLLM speaks it.

Every sampling value is written out, because an engine fills what a client leaves out from the model's own files.
"""

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length"]

READY_PREFIX = "draftmill engine at "
"""How an engine that we start says, on a line of its stdout, that it is ready; its URL follows."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen; the defaults are greedy decoding, and there is no other way to say it."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def explicit(self, max_tokens: int) -> dict[str, Any]:
        """Every value by name, as it is sent and as a row keeps it."""
        return {**msgspec.to_builtins(self), "max_tokens": max_tokens}


GREEDY = Sampling()


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
