"""Attention of consecutive blocks together, in plain matrix products: the form of CPUs, and of any device.

Anchors ascend, so a group of blocks needs only the context from its first document's start (or its window's) to its
last anchor, and its own slots. Scores of one group at a time lie in one buffer that every group of a row uses again;
they are not kept but made anew in the backward pass, from queries, keys and the rows' log-sums, as FlashAttention does
(arXiv 2205.14135). So memory does not grow with slots times context.

A query head's rows stand below those of the other heads that read the same keys: a product has many rows, and no copy
of the keys is made. Forward and backward of 2,048 context tokens, 256 anchors of 16, 4 heads of 64, 2 layers, in
CPU-seconds of a busy machine: 1.14 through scaled_dot_product_attention over the same groups, 0.94 through this.

q slots and s keys of a group; r = q * A / A' rows of a key-value head.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from draftmill.model.mask import BlockLayout, group_mask

BLOCKS_PER_GROUP = 6  # larger groups hide more keys, smaller ones call more often; flat from 4 to 8


class GroupedAttention:
    """Attention over one row; groups are made once for all layers of a kind."""

    def __init__(self, layout: BlockLayout, windows: Iterable[int | None]) -> None:
        self._groups = {window: _groups(layout, window) for window in set(windows)}

    def __call__(
        self,
        queries: Float[Tensor, "A Q C"],
        keys: Float[Tensor, "A2 S C"],
        values: Float[Tensor, "A2 S C"],
        window: int | None,
    ) -> Float[Tensor, "A Q C"]:
        attended: Tensor = _GroupedSoftmax.apply(queries, keys, values, self._groups[window])  # type: ignore[misc]
        return attended


@dataclass(frozen=True)
class _Group:
    """Consecutive blocks: their slots, the context keys any of them sees, their own keys, and who does not see whom."""

    slots: slice
    context: slice
    own: slice
    first_hidden: int
    """Every slot sees every key before this one."""
    hidden: Float[Tensor, "q h"]
    """What is added to the scores of the keys from there on: nothing, or -inf."""

    def stacked(self, states: Float[Tensor, "A Q C"], num_key_heads: int) -> Float[Tensor, "A2 r C"]:
        """The group's slots of every query head, below each other for each key-value head."""
        return states[:, self.slots].reshape(num_key_heads, -1, states.shape[-1])

    def gathered(self, states: Float[Tensor, "A2 S C"]) -> Float[Tensor, "A2 s C"]:
        """The group's keys or values: context, then its own slots'."""
        return torch.cat([states[:, self.context], states[:, self.own]], dim=1)

    def add_to(self, total: Float[Tensor, "A2 S C"], part: Float[Tensor, "A2 s C"]) -> None:
        """Adds what the group has for its keys, in the order of `gathered`."""
        num_context = self.context.stop - self.context.start
        total[:, self.context] += part[:, :num_context]
        total[:, self.own] += part[:, num_context:]


class _GroupedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, groups: list[_Group]) -> Tensor:
        output = torch.empty_like(queries)
        buffer, log_sums = _Buffer(), []
        for group in groups:
            scores = _scores(group, queries, keys, buffer)
            highest = scores.amax(dim=2, keepdim=True)
            sums = scores.sub_(highest).exp_().sum(dim=2, keepdim=True)
            attended = torch.bmm(scores.to(values.dtype), group.gathered(values)) / sums
            output[:, group.slots] = attended.view(len(queries), -1, queries.shape[2])
            log_sums.append(highest.add_(sums.log_()))
        ctx.save_for_backward(queries, keys, values, output, *log_sums)
        ctx.groups = groups
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, output, *log_sums = ctx.saved_tensors
        d_queries, d_keys, d_values = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        scale, buffer, pull_buffer = queries.shape[2] ** -0.5, _Buffer(), _Buffer()
        for group, log_sum in zip(ctx.groups, log_sums, strict=True):
            probs = _scores(group, queries, keys, buffer).sub_(log_sum).exp_()
            grad, attended, asked = (group.stacked(states, len(keys)) for states in (grads[0], output, queries))
            group.add_to(d_values, torch.bmm(probs.to(grad.dtype).transpose(1, 2), grad))
            # d softmax: a score is pulled by how much its value helps more than the row's mean.
            pull = pull_buffer.product(grad, group.gathered(values).transpose(1, 2))
            pull = pull.sub_((grad * attended).sum(dim=2, keepdim=True)).mul_(probs).to(grad.dtype)
            asked_for = torch.bmm(pull, group.gathered(keys)) * scale
            d_queries[:, group.slots] = asked_for.view(len(queries), -1, queries.shape[2])
            group.add_to(d_keys, torch.bmm(pull.transpose(1, 2), asked * scale))
        return d_queries, d_keys, d_values, None


class _Buffer:
    """Memory for one product of a batch of matrices at a time, in float32, as large as the largest so far."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)

    def product(self, left: Float[Tensor, "A2 r C"], right: Float[Tensor, "A2 C s"]) -> Float[Tensor, "A2 r s"]:
        """left @ right, where the last product lay."""
        shape = (*left.shape[:2], right.shape[2])
        if self._flat.numel() < shape[0] * shape[1] * shape[2]:
            self._flat = torch.empty(shape, device=left.device).flatten()
        into = self._flat[: shape[0] * shape[1] * shape[2]].view(shape)
        return torch.bmm(left, right, out=into) if left.dtype == into.dtype else into.copy_(torch.bmm(left, right))


def _scores(group: _Group, queries: Tensor, keys: Tensor, buffer: _Buffer) -> Float[Tensor, "A2 r s"]:
    """The group's scaled scores, -inf where a slot does not see a key."""
    asked = group.stacked(queries, len(keys)) * queries.shape[2] ** -0.5
    scores = buffer.product(asked, group.gathered(keys).transpose(1, 2))
    per_head = scores.view(len(keys), -1, len(group.hidden), scores.shape[2])
    per_head[..., group.first_hidden :] += group.hidden
    return scores


def _groups(layout: BlockLayout, window: int | None) -> list[_Group]:
    starts = range(0, layout.num_blocks, BLOCKS_PER_GROUP)
    return [_group(layout, slice(n, min(n + BLOCKS_PER_GROUP, layout.num_blocks)), window) for n in starts]


def _group(layout: BlockLayout, blocks: slice, window: int | None) -> _Group:
    context = _visible(layout, blocks, window)
    is_hidden = ~group_mask(layout, blocks, context, window)
    some_hidden = is_hidden.any(dim=0).nonzero()[:, 0]
    first_hidden = int(some_hidden[0]) if len(some_hidden) else is_hidden.shape[1]
    slots = slice(blocks.start * layout.block_size, blocks.stop * layout.block_size)
    hidden = torch.zeros(is_hidden.shape, device=is_hidden.device).masked_fill_(is_hidden, -torch.inf)
    return _Group(
        slots=slots,
        context=context,
        own=slice(layout.context_len + slots.start, layout.context_len + slots.stop),
        first_hidden=first_hidden,
        hidden=hidden[:, first_hidden:].contiguous(),
    )


def _visible(layout: BlockLayout, blocks: slice, window: int | None) -> slice:
    """The context keys that any of some consecutive blocks sees, from the first one's on."""
    anchors = layout.anchors_N[blocks]
    real = anchors[anchors >= 0]
    assert bool((real.diff() > 0).all()), "anchors ascend, padding blocks come last"
    if len(real) == 0:
        return slice(0, 0)
    first, last = int(real[0]), int(real[-1])
    start = first - int(layout.positions_T[first])
    return slice(start if window is None else max(start, first + 1 - window), last)
