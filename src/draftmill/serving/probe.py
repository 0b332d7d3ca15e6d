"""One look at every endpoint before a run: does the model answer, is it the named one, does it think as it should.

A run that finds out later has made its set in the wrong mode (sgl-project/sglang#20573), without reasoning
(vllm-project/vllm#27755) or with answers in the reasoning field (sgl-project/sglang#20786).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from draftmill.contracts.errors import ServingError
from draftmill.serving.dialects import readable
from draftmill.serving.endpoint import Endpoint
from draftmill.serving.failures import RequestRefusedError, Setback
from draftmill.serving.protocol import ChatAnswer, ChatRequest, Sampling

QUESTION = "What is 2 + 2? Answer with the number alone."
PLAIN_TOKENS = 64
THINKING_TOKENS = 2048
"""Enough for a model to think about 2 + 2 and come to an end, where no parser shows that it thinks."""
_SHOWN_CHARS = 300
_LISTED_MODELS = 10


@dataclass(frozen=True, kw_only=True)
class ProbeWish:
    """What the run needs of every endpoint."""

    model: str
    thinking: bool | None
    """Whether the model is to think; None: not checked."""
    template_kwargs: dict[str, Any]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What one endpoint is. `window_tokens` is None where it does not say."""

    url: str
    window_tokens: int | None
    gives_token_ids: bool


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


async def probe_all(endpoints: Sequence[Endpoint], wish: ProbeWish) -> list[ProbeResult]:
    """The results in order; one ServingError that names every endpoint which cannot be used, and why."""
    found = await asyncio.gather(*(probe(endpoint, wish) for endpoint in endpoints), return_exceptions=True)
    for outcome in found:
        if isinstance(outcome, BaseException) and not isinstance(outcome, ServingError):
            raise outcome
    pairs = zip(endpoints, found, strict=True)
    if faults := [f"  {endpoint.url}: {fault}" for endpoint, fault in pairs if isinstance(fault, ServingError)]:
        rest = "\nOr go on with the others: a set is bound to no endpoint" if len(faults) < len(endpoints) else ""
        raise ServingError(f"{len(faults)} of {len(endpoints)} endpoints cannot be used:\n" + "\n".join(faults) + rest)
    return [outcome for outcome in found if isinstance(outcome, ProbeResult)]


async def probe(endpoint: Endpoint, wish: ProbeWish) -> ProbeResult:
    """What the endpoint is; ServingError where it does not do what the run needs. Sets whether it is asked for ids."""
    model = await _served(endpoint, wish.model)
    window = model.max_model_len if model else None
    answer = await _answer(endpoint, wish, window)
    if fault := mode_fault(answer, wish.thinking):
        raise ServingError(fault)
    return ProbeResult(
        url=endpoint.url,
        window_tokens=window,
        gives_token_ids=answer.token_ids is not None and answer.prompt_token_ids is not None,
    )


async def _served(endpoint: Endpoint, name: str) -> _Model | None:
    """The model's entry in the list of those served; None where the server keeps no such list."""
    try:
        body = await endpoint.exchange("GET", "/models", None, endpoint.limits.min_timeout_s)
    except Setback as setback:
        raise ServingError(f"does not answer ({setback}): is the engine up, and is this its address?") from setback
    except RequestRefusedError as error:
        if error.status in (401, 403):
            raise ServingError(f"{error}: it wants a key; set OPENAI_API_KEY") from error
        return None
    models = _listed(body)
    for model in models:
        if model.id == name:
            return model
    if models:
        served = ", ".join(repr(model.id) for model in models[:_LISTED_MODELS])
        raise ServingError(f"does not serve {name!r} but {served}: name it as it is served there (--served-name)")
    return None


def _listed(body: bytes) -> list[_Model]:
    try:
        return msgspec.json.decode(body, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServingError(f"answers /models with no list of models: {readable(body)}") from error


async def _answer(endpoint: Endpoint, wish: ProbeWish, window: int | None) -> ChatAnswer:
    """The model's answer to one question. A server that refuses to be asked for token ids is asked without."""
    max_tokens = THINKING_TOKENS if wish.thinking else PLAIN_TOKENS
    request = ChatRequest(
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=min(max_tokens, window // 2) if window else max_tokens,
        sampling=wish.sampling,
        template_kwargs=wish.template_kwargs,
    )
    timeout_s = endpoint.health.patience.timeout_s(request.max_tokens, 0)
    try:
        try:
            return await endpoint.attempt(request, timeout_s)
        except RequestRefusedError as error:
            if not (endpoint.asks_token_ids and error.status in (400, 422)):
                raise
            endpoint.asks_token_ids = False
            return await endpoint.attempt(request, timeout_s)
    except Setback as setback:
        raise ServingError(f"is there, but its model does not answer: {setback}") from setback
    except RequestRefusedError as error:
        base = endpoint.url.partition("/v1")[0]
        hint = "" if endpoint.url == f"{base}/v1" else f"; OpenAI-compatible servers answer below {base}/v1"
        raise ServingError(f"does not take the question: {error}{hint}") from error


def mode_fault(answer: ChatAnswer, thinking: bool | None) -> str | None:
    """What is wrong with the mode of an answer, or None."""
    content = answer.content or ""
    thinks = bool(answer.reasoning) or "</think>" in content
    shown = (
        f"reasoning {_shown(answer.reasoning)}, content {_shown(answer.content)}, finish_reason {answer.finish_reason}"
    )
    if thinking and not thinks:
        return (
            "thinking is wanted, but the answer has neither reasoning_content nor reasoning, and no </think>: see that "
            f"its template is switched to thinking, and start it with its --reasoning-parser, or leave --thinking out "
            f"where the target cannot think; it said: {shown}"
        )
    if thinking is False and answer.content is None:
        return (
            "thinking is not wanted, but all of the answer stands in the reasoning field and content is null: start it "
            f"without --reasoning-parser, or with one that knows this mode; it said: {shown}"
        )
    if thinking is False and thinks:
        return (
            "thinking is not wanted, but the model thinks: the switch in --template-kwargs is not one that its "
            f"template knows; it said: {shown}"
        )
    return None


def _shown(text: str | None) -> str:
    return "null" if text is None else repr(text[:_SHOWN_CHARS])
