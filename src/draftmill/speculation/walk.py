"""The parallel walk: acceptance along a known answer, drafted at all its anchors at once.

One target pass gives the features of prompt and answer; every answer token but the last is an anchor in the training
layout; the walk then jumps from anchor to anchor as decoding would. Costs one pass instead of one per cycle.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftmill.contracts.acceptance import num_accepted, walk
from draftmill.model.grouped import GroupedAttention
from draftmill.model.mask import one_document
from draftmill.speculation.decode import Choice, Pair

# Bounds memory: so many blocks' hidden states, and so many rows of logits, exist at once. The head is asked for many
# rows together: seven at a time it is five times slower on a CPU.
ANCHORS_PER_PASS = 128
ROWS_PER_HEAD_CALL = 512


@dataclass(frozen=True)
class Walked:
    """What each cycle along an answer emits, and what it drafts."""

    emitted: tuple[int, ...]
    drafts: tuple[Choice, ...]


@torch.no_grad()
def walk_answer(pair: Pair, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Walked:
    """The cycles that decoding `answer_ids` behind `prompt_ids` would take."""
    drafts = _drafts(pair, prompt_ids, answer_ids)
    accepted = [num_accepted(draft.token_ids, answer_ids[at + 1 :]) for at, draft in enumerate(drafts)]
    emitted = walk(accepted, len(answer_ids))
    starts = [sum(emitted[:cycle]) for cycle in range(len(emitted))]
    return Walked(tuple(emitted), tuple(drafts[start] for start in starts))


def _drafts(pair: Pair, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[Choice]:
    """What is drafted at every answer token but the last."""
    if len(answer_ids) < 2:
        return []
    ids_T = torch.tensor([*prompt_ids, *answer_ids], device=pair.target.device)
    features_TF = pair.reader.read(ids_T[None], torch.tensor([len(ids_T)], device=ids_T.device))[0]
    context_TH = pair.drafter.project(features_TF)
    anchors = torch.arange(len(prompt_ids), len(ids_T) - 1, device=ids_T.device)
    return [draft for some in anchors.split(ANCHORS_PER_PASS) for draft in _pass(pair, ids_T, context_TH, some)]


def _pass(
    pair: Pair, ids_T: Int[Tensor, "T"], context_TH: Float[Tensor, "T H"], anchors_N: Int[Tensor, "N"]
) -> Iterator[Choice]:
    """Some consecutive anchors of one answer, in the layout of training."""
    shape = pair.drafter.shape
    layout = one_document(anchors_N, len(ids_T), shape.block_size)
    anchor_ids_N = ids_T[anchors_N]
    embeds_QH = pair.target.embed(pair.block_ids(anchor_ids_N).flatten())
    hidden_QH = pair.drafter(embeds_QH, context_TH, layout, GroupedAttention(layout, shape.windows))
    hidden_NJH = hidden_QH.unflatten(0, (-1, shape.block_size))[:, 1:]
    blocks = max(1, ROWS_PER_HEAD_CALL // hidden_NJH.shape[1])
    for some_NJH, some_ids_N in zip(hidden_NJH.split(blocks), anchor_ids_N.split(blocks), strict=True):
        yield from pair.drafts(some_NJH, some_ids_N)
