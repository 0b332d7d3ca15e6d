"""Batched greedy decoding of the target with its key-value cache.

Prompts are padded on the left, the padding masked and outside the positions, so that a row's answer is the one it has
alone (up to rounding, which can turn near ties). A row that ends leaves the batch: nothing is computed for it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache

from draftmill.extract.target import Target

_PAD_ID = 0  # masked, so any row of the embedding does


@dataclass
class Answer:
    """What the target wrote after one prompt; `token_ids` ends with the stop token exactly when it stopped."""

    token_ids: list[int] = field(default_factory=list)
    has_stopped: bool = False


def decode_greedy(
    target: Target, prompts: Sequence[Sequence[int]], stop_ids: frozenset[int], max_tokens: int
) -> list[Answer]:
    """The greedy answers to a batch of non-empty prompts, in order, of at most `max_tokens` tokens each."""
    answers = [Answer() for _ in prompts]
    open_answers = answers
    step_ids_RT, mask_RS = _left_padded(prompts, target.device)
    cache = DynamicCache(config=target.config)
    while True:
        next_R = _next_tokens(target, step_ids_RT, mask_RS, cache)
        is_open = [_append(a, t, stop_ids, max_tokens) for a, t in zip(open_answers, next_R.tolist(), strict=True)]
        if not any(is_open):
            return answers
        if not all(is_open):
            kept_R = torch.tensor([row for row, is_kept in enumerate(is_open) if is_kept], device=target.device)
            open_answers = [open_answers[row] for row in kept_R.tolist()]
            # Not batch_select_indices: the layers of hybrid targets lack it.
            cache.reorder_cache(kept_R)  # pyright: ignore[reportArgumentType]
            mask_RS, next_R = mask_RS[kept_R], next_R[kept_R]
        step_ids_RT = next_R[:, None]
        mask_RS = torch.cat([mask_RS, torch.ones_like(step_ids_RT)], dim=1)


def _left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "R T"], Int[Tensor, "R T"]]:
    """Token ids padded on the left to one length, and a mask that is 1 on tokens and 0 on padding."""
    num_tokens = max(len(prompt) for prompt in prompts)
    padding = [num_tokens - len(prompt) for prompt in prompts]
    ids = [[_PAD_ID] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * pad + [1] * (num_tokens - pad) for pad in padding]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _next_tokens(
    target: Target, step_ids_RT: Int[Tensor, "R T"], mask_RS: Int[Tensor, "R S"], cache: DynamicCache
) -> Int[Tensor, "R"]:
    """The target's choice after the tokens in the cache and `step_ids_RT`, which join it."""
    positions_RS = (mask_RS.cumsum(dim=1) - 1).clamp_(min=0)
    positions_RT = positions_RS[:, -step_ids_RT.shape[1] :]
    # Positional: releases of transformers call the fourth argument past_key_values or cache.
    with torch.no_grad():
        logits_R1V = target.model(step_ids_RT, mask_RS, positions_RT, cache, logits_to_keep=1).logits
    return logits_R1V[:, -1].argmax(dim=-1)


def _append(answer: Answer, token_id: int, stop_ids: frozenset[int], max_tokens: int) -> bool:
    """Adds one token; whether the answer goes on."""
    answer.token_ids.append(token_id)
    answer.has_stopped = token_id in stop_ids
    return not answer.has_stopped and len(answer.token_ids) < max_tokens
