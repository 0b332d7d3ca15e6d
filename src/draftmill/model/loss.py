"""What a drafter learns from: weighted cross-entropy of the drafted slots, through the target's frozen head.

    decay     w_i = exp(-(i - 1) / gamma), the loss divided by the sum of weights (DFlash, arXiv 2602.06036)
    d-pace    w_j = sum over m >= j of prod over i <= m of s_i, with s_i = (1 - alpha) q_i + alpha and q_i the label's
              probability, detached; divided by the number of supervised slots (D-PACE, arXiv 2605.18810)
    uniform   w_i = 1

Sums and divisors are kept apart, so that a step of unequal micro-batches still has one true mean. The head is applied
to a chunk of slots at a time and its input's gradient is formed on the way, unweighted, to be scaled by the weights in
the backward pass: full logits never exist and nothing is computed twice. J = B - 1 drafted slots, P supervised ones.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LossKind = Literal["d-pace", "decay", "uniform"]

# Logits at a time: 44 MB in float32. Measured best on CPU (672 slots of 576 over 49,152 rows: 1.5 s; whole: 2.3 s).
LOGITS_PER_CHUNK = 11_000_000


@dataclass(frozen=True)
class LossRule:
    """How slots are weighted; `gamma` is decay's, `alpha` d-pace's."""

    kind: LossKind
    gamma: float
    alpha: float


@dataclass(frozen=True)
class BlockLoss:
    """One micro-batch: `nats / weight` is its mean, and sums over micro-batches give the step's."""

    nats: Float[Tensor, ""]
    """Weighted sum of cross-entropies; backward starts here."""
    weight: Float[Tensor, ""]
    """The divisor that belongs to it."""
    correct_NJ: Bool[Tensor, "N J"]
    """Supervised slots whose most likely token is the label."""


def block_loss(
    hidden_NJH: Float[Tensor, "N J H"],
    labels_NJ: Int[Tensor, "N J"],
    supervised_NJ: Bool[Tensor, "N J"],
    head_VH: Float[Tensor, "V H"],
    rule: LossRule,
    logits_per_chunk: int = LOGITS_PER_CHUNK,
) -> BlockLoss:
    """The loss of slots 1 .. B - 1 of every block; unsupervised slots cost nothing and learn nothing."""
    nats_P, correct_P = head_nats(hidden_NJH[supervised_NJ], labels_NJ[supervised_NJ], head_VH, logits_per_chunk)
    label_prob_NJ = torch.zeros(supervised_NJ.shape, device=nats_P.device)
    label_prob_NJ[supervised_NJ] = torch.exp(-nats_P.detach())
    weights_NJ = slot_weights(label_prob_NJ, supervised_NJ, rule)
    divisor = supervised_NJ.sum().float() if rule.kind == "d-pace" else weights_NJ.sum()
    correct_NJ = torch.zeros_like(supervised_NJ)
    correct_NJ[supervised_NJ] = correct_P
    return BlockLoss((nats_P * weights_NJ[supervised_NJ]).sum(), divisor, correct_NJ)


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


def head_nats(
    hidden_PH: Float[Tensor, "P H"], labels_P: Int[Tensor, "P"], head_VH: Float[Tensor, "V H"], logits_per_chunk: int
) -> tuple[Float[Tensor, "P"], Bool[Tensor, "P"]]:
    """Cross-entropy of every slot, in float32, and whether its most likely token is the label."""
    return _HeadNats.apply(hidden_PH, labels_P, head_VH, logits_per_chunk)  # type: ignore[return-value]


class _HeadNats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_PH: Tensor, labels_P: Tensor, head_VH: Tensor, logits_per_chunk: int
    ) -> tuple[Tensor, Tensor]:
        size = max(1, logits_per_chunk // len(head_VH))
        chunks = [
            _chunk(hidden, labels, head_VH)
            for hidden, labels in zip(hidden_PH.split(size), labels_P.split(size), strict=True)
        ]
        nats_P, correct_P, gradient_PH = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        ctx.save_for_backward(gradient_PH.to(hidden_PH.dtype))
        ctx.mark_non_differentiable(correct_P)
        return nats_P, correct_P

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_PH,) = ctx.saved_tensors
        return gradient_PH * grads[0][:, None].to(gradient_PH.dtype), None, None, None


def _chunk(hidden_PH: Tensor, labels_P: Tensor, head_VH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nats, correctness and d nats / d hidden of some slots; one logits-sized buffer, worked on in place."""
    logits_PV = (hidden_PH.to(head_VH.dtype) @ head_VH.T).float()
    highest_P1, likeliest_P1 = logits_PV.max(dim=1, keepdim=True)
    label_P1 = logits_PV.gather(1, labels_P[:, None]) - highest_P1
    exps_PV = logits_PV.sub_(highest_P1).exp_()
    total_P1 = exps_PV.sum(dim=1, keepdim=True)
    mean_PH = (exps_PV.to(head_VH.dtype) @ head_VH).float() / total_P1
    nats_P = (total_P1.log() - label_P1)[:, 0]
    return nats_P, likeliest_P1[:, 0] == labels_P, mean_PH - head_VH[labels_P].float()
