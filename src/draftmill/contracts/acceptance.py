"""Acceptance length: what one verification cycle emits, and how the figures over many cycles are defined.

A cycle drafts B - 1 tokens; the target accepts the leading run that equals its own choice and adds one token of its
own (the bonus). tau is the mean number of tokens emitted per cycle, bonus included, in [1, B]: macro is the mean over
requests of each request's mean (the DFlash paper's), micro the mean over all cycles (vLLM's). A cycle cut by a stop
token counts what it emitted up to and including that token.
"""

from collections.abc import Sequence
from statistics import fmean

import msgspec


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """Figures over a set of requests; `accepted_frac[i]` is the share of cycles that accepted draft slot i + 1."""

    tau: float
    tau_micro: float
    accepted_frac: tuple[float, ...]
    num_requests: int
    num_cycles: int
    num_tokens: int


def num_accepted(draft: Sequence[int], truth: Sequence[int]) -> int:
    """Length of the leading run in which the drafted tokens equal the target's own."""
    count = 0
    while count < min(len(draft), len(truth)) and draft[count] == truth[count]:
        count += 1
    return count


def walk(accepted: Sequence[int], num_tokens: int) -> list[int]:
    """Tokens emitted by each cycle of one answer, from the acceptance at every position.

    `accepted[t]` is how many drafts were right with the anchor at answer token t; `num_tokens` the answer's length.
    The target's prefill gives token 0, so cycles emit tokens 1 .. num_tokens - 1; the last cycle ends with the answer.
    """
    emitted = []
    at = 0
    while at < num_tokens - 1:
        step = min(accepted[at] + 1, num_tokens - 1 - at)
        emitted.append(step)
        at += step
    return emitted


def summarize(requests: Sequence[Sequence[int]], block_size: int) -> Acceptance:
    """Acceptance figures from the tokens each cycle of each request emitted; requests without a cycle are left out."""
    requests = [cycles for cycles in requests if cycles]
    cycles = [emitted for request in requests for emitted in request]
    if not cycles:
        raise ValueError("no verification cycle to summarize: every answer is a single token")
    assert all(1 <= emitted <= block_size for emitted in cycles), "a cycle emits between 1 and B tokens"
    return Acceptance(
        tau=fmean(fmean(request) for request in requests),
        tau_micro=fmean(cycles),
        accepted_frac=tuple(fmean(emitted > slot for emitted in cycles) for slot in range(1, block_size)),
        num_requests=len(requests),
        num_cycles=len(cycles),
        num_tokens=sum(cycles),
    )
