"""What a drafter learns from: the weighted cost of the drafted slots, through the target's frozen head.

    decay     w_i = exp(-(i - 1) / gamma), the loss divided by the sum of weights (DFlash, arXiv 2602.06036)
    d-pace    w_j = sum over m >= j of prod over i <= m of s_i, with s_i = (1 - alpha) q_i + alpha and q_i the label's
              probability, detached; divided by the number of supervised slots (D-PACE, arXiv 2605.18810)
    uniform   w_i = 1

A slot's cost is cross-entropy, KL, total variation, or a sum of them (`vocabulary.py`). Sums and divisors are kept
apart, so that a step of unequal micro-batches still has one true mean. J = B - 1 drafted slots, P supervised ones.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftmill.model.vocabulary import Objective, head_costs, tile_of

LossKind = Literal["d-pace", "decay", "uniform"]


@dataclass(frozen=True)
class LossRule:
    """How slots are weighted (`gamma` is decay's, `alpha` d-pace's), and what a slot costs."""

    kind: LossKind
    gamma: float
    alpha: float
    objective: Objective


@dataclass(frozen=True)
class Truth:
    """What drafted slots are held against."""

    supervised_NJ: Bool[Tensor, "N J"]
    """Slots that are learnt from; they lead their block."""
    labels_NJ: Int[Tensor, "N J"] | None
    """The right tokens; None: the target's most likely ones."""
    target_PH: Float[Tensor, "P H"] | None = None
    """What the target's head is given to say each supervised slot's token; needed by KL, TV and for its own labels."""
    before_NJ: Int[Tensor, "N J"] | None = None
    """The text's token before each slot, for heads that look at it."""


@dataclass(frozen=True)
class BlockLoss:
    """One micro-batch: `nats / weight` is its mean, and sums over micro-batches give the step's."""

    nats: Float[Tensor, ""]
    """Weighted sum of slot costs; backward starts here."""
    weight: Float[Tensor, ""]
    """The divisor that belongs to it."""
    correct_NJ: Bool[Tensor, "N J"]
    """Supervised slots whose most likely token is the label."""


def block_loss(
    hidden_NJH: Float[Tensor, "N J H"],
    truth: Truth,
    head_VH: Float[Tensor, "V H"],
    rule: LossRule,
    tile_logits: int | None = None,
) -> BlockLoss:
    """The loss of slots 1 .. B - 1 of every block; unsupervised slots cost nothing and learn nothing."""
    supervised_NJ = truth.supervised_NJ
    labels_P = None if truth.labels_NJ is None else truth.labels_NJ[supervised_NJ]
    tile = tile_of(head_VH, rule.objective, tile_logits)
    costs = head_costs(hidden_NJH[supervised_NJ], labels_P, truth.target_PH, head_VH, rule.objective, tile)
    label_prob_NJ = torch.zeros(supervised_NJ.shape, device=head_VH.device)
    label_prob_NJ[supervised_NJ] = torch.exp(-costs.nats_P)
    weights_NJ = slot_weights(label_prob_NJ, supervised_NJ, rule)
    divisor = supervised_NJ.sum().float() if rule.kind == "d-pace" else weights_NJ.sum()
    correct_NJ = torch.zeros_like(supervised_NJ)
    correct_NJ[supervised_NJ] = costs.is_likeliest_P
    return BlockLoss((costs.cost_P * weights_NJ[supervised_NJ]).sum(), divisor, correct_NJ)


def slot_weights(
    label_prob_NJ: Float[Tensor, "N J"], supervised_NJ: Bool[Tensor, "N J"], rule: LossRule
) -> Float[Tensor, "N J"]:
    """The weight of every slot; 0 where it is not supervised (supervised slots lead their block)."""
    if rule.kind == "uniform":
        return supervised_NJ.float()
    if rule.kind == "decay":
        behind_J = torch.arange(supervised_NJ.shape[1], device=supervised_NJ.device)
        return torch.exp(-behind_J / rule.gamma) * supervised_NJ
    reach_NJ = (((1 - rule.alpha) * label_prob_NJ + rule.alpha) * supervised_NJ).cumprod(dim=1)
    return reach_NJ.flip(1).cumsum(dim=1).flip(1)
