"""What drafted slots cost through the target's frozen head, streamed over tiles of slots by vocabulary rows.

Per slot, with q the drafter's distribution and p the target's own:

    hard   -log q(label)                     label: the text's token, or the target's most likely one
    kl     KL(p || q) = sum p (log p - log q)
    tv     sum |p - q| / 2, which is 1 - the probability of acceptance under rejection sampling

The head is frozen, so all that backward needs is d cost / d hidden, and every part of it is a mean of head rows: under
q, under p, or the label's own. Such a mean is attention with the head as keys and values, so it is accumulated tile
after tile with a running maximum, as FlashAttention does (arXiv 2205.14135): logits exist for one tile at a time,
nothing is computed twice, and backward only scales. TV wants both distributions whole before a sign is known: there a
tile spans the vocabulary. R slots of one tile, W vocabulary rows of one tile, P slots in all.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Measured on a CPU: 512 x 2,048 logits (4 MB) stay in its caches, and a step over 65,536 rows costs 1.04 of its bare
# matrix products where tiles of 44 MB cost 1.4.
TILE_LOGITS = 1 << 20
# A GPU wants long matrix products: 256 MB of float32 logits.
TILE_LOGITS_CUDA = 1 << 26
# Tiles that span the vocabulary keep several slots, or the head would be read once for each.
TILE_LOGITS_WHOLE = 11_000_000
ROWS_PER_TILE = 512
# An index costs twenty times what a maximum does (2.6 against 0.13 ms for 512 x 2,048): it is looked for in one piece.
ROWS_PER_PIECE = 128


@dataclass(frozen=True)
class Objective:
    """How much each part of a slot's cost counts."""

    hard: float
    kl: float
    tv: float

    @property
    def needs_target(self) -> bool:
        """Whether the target's own distribution takes part."""
        return self.kl > 0 or self.tv > 0


@dataclass(frozen=True)
class Tile:
    """How many slots and vocabulary rows are worked on at a time."""

    slots: int
    rows: int


@dataclass(frozen=True)
class HeadCosts:
    """Every slot's cost, and what is known of it; only `cost_P` takes gradients."""

    cost_P: Float[Tensor, "P"]
    nats_P: Float[Tensor, "P"]
    """-log q(label), whatever the objective."""
    is_likeliest_P: Bool[Tensor, "P"]
    """Whether the label is the drafter's most likely token (the lowest of equals)."""


def tile_of(head_VH: Float[Tensor, "V H"], objective: Objective, logits: int | None = None) -> Tile:
    """The tile for a head and an objective, of about `logits` logits; None: what its device likes."""
    num_rows = len(head_VH)
    size = logits or (TILE_LOGITS_CUDA if head_VH.is_cuda else TILE_LOGITS)
    if objective.tv > 0:
        return Tile(max(1, (logits or max(size, TILE_LOGITS_WHOLE)) // num_rows), num_rows)
    slots = max(1, min(ROWS_PER_TILE, size))
    return Tile(slots, min(num_rows, max(1, size // slots)))


def head_costs(
    hidden_PH: Float[Tensor, "P H"],
    labels_P: Int[Tensor, "P"] | None,
    target_PH: Float[Tensor, "P H"] | None,
    head_VH: Float[Tensor, "V H"],
    objective: Objective,
    tile: Tile,
) -> HeadCosts:
    """The cost of every slot, in float32. `target_PH` is what the target's head is given to say the slot's token.

    `labels_P` None takes the target's most likely token for the label.
    """
    assert labels_P is not None or target_PH is not None, "a label is the text's or the target's"
    assert target_PH is not None or not objective.needs_target, "KL and TV compare with the target's distribution"
    cost_P, nats_P, is_likeliest_P = _HeadCosts.apply(hidden_PH, labels_P, target_PH, head_VH, objective, tile)  # type: ignore[misc]
    return HeadCosts(cost_P, nats_P, is_likeliest_P)


class _HeadCosts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PH: Tensor,
        labels_P: Tensor | None,
        target_PH: Tensor | None,
        head_VH: Tensor,
        objective: Objective,
        tile: Tile,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient_PH = torch.empty_like(hidden_PH)
        cost_P, nats_P = hidden_PH.new_empty((2, len(hidden_PH)), dtype=torch.float32)
        is_likeliest_P = torch.empty(len(hidden_PH), dtype=torch.bool, device=hidden_PH.device)
        for start in range(0, len(hidden_PH), tile.slots):
            some = slice(start, start + tile.slots)
            labels_R = None if labels_P is None else labels_P[some]
            target_RH = None if target_PH is None else target_PH[some]
            slots = _Slots(hidden_PH[some], labels_R, target_RH, head_VH, objective)
            for first in range(0, len(head_VH), tile.rows):
                slots.take(first, min(first + tile.rows, len(head_VH)))
            cost_P[some], gradient_PH[some] = slots.finish()
            nats_P[some], is_likeliest_P[some] = slots.nats_R, slots.is_likeliest_R
        ctx.save_for_backward(gradient_PH)
        ctx.mark_non_differentiable(nats_P, is_likeliest_P)
        return cost_P, nats_P, is_likeliest_P

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_PH,) = ctx.saved_tensors
        return gradient_PH * grads[0][:, None].to(gradient_PH.dtype), None, None, None, None, None


class _Softmax:
    """A softmax over the vocabulary rows seen so far, and the mean of the head's rows under it."""

    def __init__(self, states_RH: Tensor, head_VH: Tensor, *, has_mean: bool) -> None:
        self._states_RH = states_RH.to(head_VH.dtype)
        self._head_VH = head_VH
        num_slots = len(states_RH)
        self.highest_R1 = states_RH.new_full((num_slots, 1), -torch.inf, dtype=torch.float32)
        self.likeliest_R = torch.zeros(num_slots, dtype=torch.long, device=states_RH.device)
        self.total_R1 = torch.zeros_like(self.highest_R1)
        self._sum_RH = torch.zeros(states_RH.shape, device=states_RH.device) if has_mean else None
        self.exps_RW: Tensor

    def logits(self, first: int, end: int) -> Tensor:
        """The logits of some vocabulary rows, float32; a buffer of its own."""
        return _product(self._states_RH, self._head_VH[first:end].T)

    def take(self, logits_RW: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Adds the rows from `first` on; their logits become exponentials in place.

        Returns how former sums shrank, and which slots have a new likeliest row.
        """
        pieces_RPW = _pieces(logits_RW)
        tops_RP = pieces_RPW.amax(dim=2)
        highest_R1 = torch.maximum(self.highest_R1, tops_RP.amax(dim=1, keepdim=True))
        risen_r = (highest_R1 > self.highest_R1)[:, 0].nonzero()[:, 0]
        self.likeliest_R[risen_r] = _argmax(pieces_RPW, tops_RP, risen_r) + first
        shrink_R1 = (self.highest_R1 - highest_R1).exp_()
        self.highest_R1 = highest_R1
        self.exps_RW = logits_RW.sub_(highest_R1).exp_()
        self.total_R1.mul_(shrink_R1).add_(self.exps_RW.sum(dim=1, keepdim=True))
        if self._sum_RH is not None:
            rows_WH = self._head_VH[first : first + logits_RW.shape[1]]
            if rows_WH.dtype == torch.float32:
                self._sum_RH.mul_(shrink_R1).addmm_(self.exps_RW, rows_WH)
            else:
                self._sum_RH.mul_(shrink_R1).add_(_product(self.exps_RW.to(rows_WH.dtype), rows_WH))
        return shrink_R1, risen_r

    @property
    def log_total_R(self) -> Tensor:
        """log of the sum of exponentials of all logits."""
        return (self.highest_R1 + self.total_R1.log())[:, 0]

    @property
    def mean_RH(self) -> Tensor:
        """The mean of the head's rows under the softmax."""
        assert self._sum_RH is not None
        return self._sum_RH / self.total_R1


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` in float32. CUDA adds narrower numbers up in float32 and need not round the sums to give them;
    a CPU has no such product, and its logits are rounded to the head's dtype first (bfloat16: 3 digits)."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


def _pieces(logits_RW: Tensor) -> Float[Tensor, "R P w"]:
    """The logits of a tile in pieces of a row; in one piece where the tile cannot be cut evenly."""
    width = logits_RW.shape[1]
    return logits_RW.unflatten(1, (-1, ROWS_PER_PIECE if width % ROWS_PER_PIECE == 0 else width))


def _argmax(
    pieces_RPW: Float[Tensor, "R P w"], tops_RP: Float[Tensor, "R P"], some_r: Int[Tensor, "r"]
) -> Int[Tensor, "r"]:
    """Where the first of the greatest logits stands, for some slots: its piece by the pieces' tops, then within it."""
    piece_r = tops_RP[some_r].argmax(dim=1)
    return piece_r * pieces_RPW.shape[2] + pieces_RPW[some_r, piece_r].argmax(dim=1)


class _Slots:
    """Some slots on their way through the vocabulary."""

    def __init__(
        self,
        hidden_RH: Tensor,
        labels_R: Tensor | None,
        target_RH: Tensor | None,
        head_VH: Tensor,
        objective: Objective,
    ) -> None:
        self._objective = objective
        self._labels_R = labels_R
        self._head_VH = head_VH
        self._q = _Softmax(hidden_RH, head_VH, has_mean=True)
        is_used = objective.needs_target or labels_R is None
        self._p = None
        if target_RH is not None and is_used:
            self._p = _Softmax(target_RH, head_VH, has_mean=objective.kl > 0)
        self._label_logit_R = torch.zeros(len(hidden_RH), device=hidden_RH.device)
        self._cross_R1 = torch.zeros(len(hidden_RH), 1, device=hidden_RH.device)

    def take(self, first: int, end: int) -> None:
        """Adds the vocabulary rows from `first` to `end`."""
        logits_RW = self._q.logits(first, end)
        if self._labels_R is not None:
            at_R = self._labels_R - first
            is_here_R = (at_R >= 0) & (at_R < end - first)
            found_R = logits_RW.gather(1, at_R.clamp(0, end - first - 1)[:, None])[:, 0]
            self._label_logit_R = torch.where(is_here_R, found_R, self._label_logit_R)
        if self._p is not None:
            self._take_target(self._p, logits_RW, first, end)
        self._q.take(logits_RW, first)

    def _take_target(self, p: _Softmax, logits_RW: Tensor, first: int, end: int) -> None:
        theirs_RW = p.logits(first, end)
        ahead_RW = theirs_RW - logits_RW if self._objective.kl > 0 else None
        shrink_R1, risen_r = p.take(theirs_RW, first)
        if ahead_RW is not None:
            self._cross_R1.mul_(shrink_R1).add_(ahead_RW.mul_(p.exps_RW).sum(dim=1, keepdim=True))
        if self._labels_R is None:
            self._label_logit_R[risen_r] = logits_RW[risen_r, p.likeliest_R[risen_r] - first]

    @property
    def _final_labels_R(self) -> Tensor:
        if self._labels_R is not None:
            return self._labels_R
        assert self._p is not None
        return self._p.likeliest_R

    @property
    def nats_R(self) -> Tensor:
        """-log q(label)."""
        return self._q.log_total_R - self._label_logit_R

    @property
    def is_likeliest_R(self) -> Tensor:
        """Whether the label is the drafter's most likely token."""
        return self._q.likeliest_R == self._final_labels_R

    def finish(self) -> tuple[Tensor, Tensor]:
        """Cost and d cost / d hidden of every slot, once all rows are taken."""
        objective, mean_RH = self._objective, self._q.mean_RH
        cost_R = objective.hard * self.nats_R
        gradient_RH = (objective.hard + objective.kl) * mean_RH
        if objective.hard:
            gradient_RH -= objective.hard * self._head_VH[self._final_labels_R].float()
        if objective.kl and self._p is not None:
            ahead_R = (self._cross_R1 / self._p.total_R1)[:, 0]
            cost_R += objective.kl * (ahead_R - self._p.log_total_R + self._q.log_total_R)
            gradient_RH -= objective.kl * self._p.mean_RH
        if objective.tv and self._p is not None:
            distance_R, pull_RH = _total_variation(self._q, self._p, self._head_VH)
            cost_R += objective.tv * distance_R
            gradient_RH += objective.tv * pull_RH
        return cost_R, gradient_RH


def _total_variation(q: _Softmax, p: _Softmax, head_VH: Tensor) -> tuple[Tensor, Tensor]:
    """sum |p - q| / 2 and its gradient; both tiles span the vocabulary. Works in their buffers.

    With s = sign(q - p) / 2 the gradient by q's logits is q (s - sum q s).
    """
    q_RV = q.exps_RW.div_(q.total_R1)
    sign_RV = p.exps_RW.div_(p.total_R1).sub_(q_RV).neg_()
    distance_R = sign_RV.abs().sum(dim=1) / 2
    pushed_RV = sign_RV.sign_().div_(2).mul_(q_RV)
    pushed_RV.sub_(q_RV.mul_(pushed_RV.sum(dim=1, keepdim=True)))
    return distance_R, _product(pushed_RV.to(head_VH.dtype), head_VH)
