"""Acceptance on held-out prompts while a run goes on: what serving would see, at steps whose weights are saved.

    tau           the target decodes some prompts with the drafter before it, as an engine does
    tau_walked    known answers of the target, drafted at all their tokens at once, and walked from the first one on:
                  take the block's accepted length, jump there, and so on to the end; no decoding

Works on a copy of the published weights in the target's dtype and draws nothing, so that the weights of a run are the
same with and without it.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from draftmill.contracts.acceptance import summarize
from draftmill.contracts.errors import InputError, RecipeError
from draftmill.extract.target import Target
from draftmill.model.checkpoint import copy_of
from draftmill.model.drafter import Drafter
from draftmill.settings.evaluate import EvaluateSettings
from draftmill.settings.train import TrainSettings
from draftmill.speculation.decode import Limits, Pair, decode_speculatively
from draftmill.speculation.leak import warn_of_leak
from draftmill.speculation.requests import Request, choose, fitting
from draftmill.speculation.walk import walk_answer
from draftmill.storage.waiting import nothing

log = logging.getLogger(__name__)

_PREFILL_TOKENS: int = EvaluateSettings.model_fields["prefill_tokens"].default


Gauge = Callable[[Drafter], dict[str, Any]]
"""Gives the figures of a drafter as it stands, as they join the step's line: by this rank's own target, or by asking
another rank."""


class MeasuringError(RecipeError):
    """A device is too full to measure what a run has learnt; the run itself is whole."""


def is_due(every: int | None, step: int, num_steps: int) -> bool:
    """Whether a run of `num_steps` is measured when `step` steps are done: every so many, and at the last."""
    return every is not None and step > 0 and (step % every == 0 or step == num_steps)


def next_due(every: int | None, done: int, num_steps: int) -> int:
    """The first step after `done` at which a run is measured; its last where it never is."""
    return num_steps if every is None else min((done // every + 1) * every, num_steps)


class HeldOut:
    """Some held-out requests of one target: which are decoded, and which are walked."""

    def __init__(
        self, target: Target, requests: Sequence[Request], stop_ids: frozenset[int], settings: TrainSettings
    ) -> None:
        self.heed: Callable[[], None] = nothing
        """Called before each request: raises where the run is to stop."""
        self._target = target
        self._limits = Limits(stop_ids, settings.eval_max_new_tokens, _PREFILL_TOKENS)
        usable = fitting(requests, settings.eval_max_new_tokens, target.max_positions)
        answered = [request for request in usable if request.answer_ids]
        self.decoded = _some(usable, settings.eval_decode_prompts, settings.seed)
        self.walked = _some(answered, settings.eval_walk_prompts, settings.seed)
        if not self.decoded and not self.walked:
            raise InputError(
                f"{', '.join(settings.eval_input)}: none of {len(requests)} held-out prompts can be used: "
                f"{len(requests) - len(usable)} do not fit the target's window of {target.max_positions} tokens with "
                f"--eval-max-new-tokens {settings.eval_max_new_tokens}, and {len(answered)} have an answer to walk: "
                "lower --eval-max-new-tokens, give shorter prompts, or raise --eval-decode-prompts"
            )

    def measure(self, drafter: Drafter) -> dict[str, Any]:
        """The figures of a drafter that goes on being trained, and is left as it is."""
        with telling_of_full_devices():
            twin = copy_of(drafter, self._target.embed.weight.dtype)
        return self.measure_given(twin)

    def measure_given(self, drafter: Drafter) -> dict[str, Any]:
        """The figures of a drafter that nobody else holds: it is brought to the target as it is."""
        start = time.perf_counter()
        with telling_of_full_devices():
            pair, block_size = Pair.of(self._target, drafter), drafter.shape.block_size
            decoded = [self._decoded(pair, request) for request in self.decoded]
            walked = [self._walked(pair, request) for request in self.walked]
        figures = {**_taus("tau", decoded, block_size), **_taus("tau_walked", walked, block_size)}
        return {**figures, "eval_s": round(time.perf_counter() - start, 3)}

    def _decoded(self, pair: Pair, request: Request) -> Sequence[int]:
        self.heed()
        return decode_speculatively(pair, request.prompt_ids, self._limits).emitted

    def _walked(self, pair: Pair, request: Request) -> Sequence[int]:
        self.heed()
        return walk_answer(pair, request.prompt_ids, self._limits.cut(request.answer_ids)).emitted


@contextmanager
def telling_of_full_devices() -> Iterator[None]:
    """MeasuringError where a device runs out of memory, with what takes less of it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MeasuringError(
            f"no memory is left to measure held-out prompts ({str(error).splitlines()[0]}): lower "
            "--eval-max-new-tokens or --eval-decode-prompts, or leave --eval-every out; the step is kept, and the run "
            "goes on from it"
        ) from error


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
