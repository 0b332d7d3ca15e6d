"""Acceptance on held-out prompts while a run goes on: what serving would see, at steps whose weights are saved.

    tau           the target decodes some prompts with the drafter before it, as an engine does
    tau_walked    known answers of the target, drafted at all their tokens at once, and walked from the first one on:
                  take the block's accepted length, jump there, and so on to the end; no decoding

Works on a copy of the published weights in the target's dtype and draws nothing, so that the weights of a run are the
same with and without it.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from draftmill.contracts.acceptance import summarize
from draftmill.contracts.errors import InputError
from draftmill.extract.target import Target
from draftmill.model.checkpoint import copy_of
from draftmill.model.drafter import Drafter
from draftmill.settings.evaluate import EvaluateSettings
from draftmill.settings.train import TrainSettings
from draftmill.speculation.decode import Limits, Pair, decode_speculatively
from draftmill.speculation.leak import warn_of_leak
from draftmill.speculation.requests import Request, choose
from draftmill.speculation.walk import walk_answer

log = logging.getLogger(__name__)

_PREFILL_TOKENS: int = EvaluateSettings.model_fields["prefill_tokens"].default


def is_due(every: int, step: int, num_steps: int) -> bool:
    """Whether a run of `num_steps` is measured when `step` steps are done: every so many, and at the last."""
    return step % every == 0 or step == num_steps


@runtime_checkable
class Gauge(Protocol):
    """Who measures: this rank with its own target, or another that is asked to."""

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether a run of `num_steps` is measured when `step` steps are done."""
        ...

    def measure(self, drafter: Drafter) -> dict[str, Any]:
        """The figures of these weights, as they join the step's line."""
        ...


class HeldOut:
    """Some held-out requests of one target: which are decoded, and which are walked."""

    def __init__(
        self, target: Target, requests: Sequence[Request], stop_ids: frozenset[int], settings: TrainSettings
    ) -> None:
        assert settings.eval_every is not None, "nobody measures a run that did not ask for it"
        self._every = settings.eval_every
        self._target = target
        self._limits = Limits(stop_ids, settings.eval_max_new_tokens, _PREFILL_TOKENS)
        fitting = [r for r in requests if len(r.prompt_ids) + self._limits.max_new_tokens <= target.max_positions]
        answered = [request for request in fitting if request.answer_ids]
        self.decoded = _some(fitting, settings.eval_decode_prompts, settings.seed)
        self.walked = _some(answered, settings.eval_walk_prompts, settings.seed)
        if not self.decoded and not self.walked:
            raise InputError(
                f"{', '.join(settings.eval_input)}: none of {len(requests)} held-out prompts can be used: "
                f"{len(requests) - len(fitting)} do not fit the target's window of {target.max_positions} tokens with "
                f"--eval-max-new-tokens {settings.eval_max_new_tokens}, and {len(answered)} have an answer to walk"
            )

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether a run of `num_steps` is measured when `step` steps are done."""
        return is_due(self._every, step, num_steps)

    def measure(self, drafter: Drafter) -> dict[str, Any]:
        """The figures of these weights, as they join the step's line."""
        start = time.perf_counter()
        pair = Pair.of(self._target, copy_of(drafter, self._target.embed.weight.dtype))
        limits, block_size = self._limits, drafter.shape.block_size
        decoded = [decode_speculatively(pair, request.prompt_ids, limits).emitted for request in self.decoded]
        walked = [walk_answer(pair, r.prompt_ids, limits.cut(r.answer_ids)).emitted for r in self.walked]
        figures = {**_taus("tau", decoded, block_size), **_taus("tau_walked", walked, block_size)}
        tell(figures, block_size)
        return {**figures, "eval_s": round(time.perf_counter() - start, 3)}


def tell(figures: Mapping[str, float | None], block_size: int) -> None:
    """Says what was measured, with a warning where it is too good to be true."""
    for name in ("tau", "tau_walked"):
        if (tau := figures[name]) is not None:
            log.info("held out: %s %.3f of %d", name, tau, block_size)
            warn_of_leak(tau, block_size)


def _some(requests: Sequence[Request], count: int, seed: int) -> tuple[Request, ...]:
    return tuple(choose(requests, (), count, seed)) if requests and count else ()


def _taus(name: str, requests: Sequence[Sequence[int]], block_size: int) -> dict[str, float | None]:
    """Macro and micro mean of tokens emitted per cycle; None where no request has a cycle."""
    if not any(requests):
        return {name: None, f"{name}_micro": None}
    found = summarize(requests, block_size)
    return {name: found.tau, f"{name}_micro": found.tau_micro}
