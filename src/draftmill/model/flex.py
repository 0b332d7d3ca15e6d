"""Attention by torch's flex kernels: what CUDA runs. The rule is `mask.py`'s, told cell by cell to a compiled kernel.

Queries and keys are padded to the kernels' tile of 128 (block masks are tied to exact lengths, pytorch/pytorch#141625):

    queries   N * B slots, then padding that sees its own padding key and nothing else
    keys      T context tokens, padding nobody sees, then the queries' own slots

One mask function serves full and sliding layers: the window is a tensor, so both share one compiled kernel, and anchors
are tensors too, so that a new draw compiles nothing. Backward exists on CUDA only (torch refuses it elsewhere).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from draftmill.model.mask import BlockLayout

KERNEL_TILE = 128
# Ada, consumer Ampere and consumer Blackwell give a block 101,376 bytes of shared memory; the backward kernel's default
# tiles want 114,688 from 128 channels on (pytorch/pytorch#198224).
SMALL_SHARED_MEMORY = {(8, 6), (8, 9), (12, 0), (12, 1)}
SMALL_TILES = {
    **{"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_M1": 32, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 32},
    **{"num_stages": 1, "num_warps": 4},
}
_NO_WINDOW = 1 << 30


def kernel_options(capability: tuple[int, int] | None, head_dim: int) -> dict[str, Any]:
    """Kernel tiles for a card's compute capability (None: no CUDA) and a head's channels; empty: torch's own choice."""
    return dict(SMALL_TILES) if capability in SMALL_SHARED_MEMORY and head_dim > 64 else {}


@dataclass(frozen=True)
class FlexKernels:
    """How block masks are built and attention is called, and the options it is called with."""

    build: Callable[..., BlockMask] = create_block_mask
    attend: Callable[..., Any] = flex_attention
    options: dict[str, Any] = field(default_factory=dict)


@cache
def compiled_kernels(device_index: int, head_dim: int) -> FlexKernels:
    """The kernels of a CUDA device: compiled once each for constant shapes, the mask too (else it is built dense)."""
    options = kernel_options(torch.cuda.get_device_capability(device_index), head_dim)
    return FlexKernels(
        torch.compile(create_block_mask, dynamic=False), torch.compile(flex_attention, dynamic=False), options
    )


class FlexAttention:
    """Attention over one row through flex kernels; block masks are built once for all layers of a kind."""

    def __init__(self, layout: BlockLayout, windows: Iterable[int | None], kernels: FlexKernels) -> None:
        self._kernels = kernels
        self._context_len = layout.context_len
        self._num_slots = layout.num_blocks * layout.block_size
        self._padded_context = _padded(layout.context_len)
        self._padded_slots = _padded(self._num_slots)
        self._masks = {window: self._block_mask(layout, window) for window in set(windows)}

    def __call__(
        self,
        queries: Float[Tensor, "A Q C"],
        keys: Float[Tensor, "A2 S C"],
        values: Float[Tensor, "A2 S C"],
        window: int | None,
    ) -> Float[Tensor, "A Q C"]:
        slots = F.pad(queries, (0, 0, 0, self._padded_slots - self._num_slots))
        attended = self._kernels.attend(
            slots[None],
            self._pad_keys(keys)[None],
            self._pad_keys(values)[None],
            block_mask=self._masks[window],
            enable_gqa=len(queries) != len(keys),
            kernel_options=self._kernels.options or None,
        )
        return attended[0, :, : self._num_slots]

    def _pad_keys(self, keys: Float[Tensor, "A2 S C"]) -> Float[Tensor, "A2 s C"]:
        context, own = keys[:, : self._context_len], keys[:, self._context_len :]
        context_pad, own_pad = self._padded_context - self._context_len, self._padded_slots - self._num_slots
        return torch.cat([F.pad(context, (0, 0, 0, context_pad)), F.pad(own, (0, 0, 0, own_pad))], dim=1)

    def _block_mask(self, layout: BlockLayout, window: int | None) -> BlockMask:
        device = layout.anchors_N.device
        documents_t = F.pad(layout.documents_T, (0, self._padded_context - self._context_len), value=-1)
        sees = _rule(
            anchor_q=self._per_slot(layout.anchors_N, layout.block_size),
            document_q=self._per_slot(documents_t[layout.anchors_N.clamp(min=0)], layout.block_size),
            documents_t=documents_t,
            block_size=layout.block_size,
            window=torch.tensor(_NO_WINDOW if window is None else window, device=device),
        )
        size = (self._padded_slots, self._padded_context + self._padded_slots)
        return self._kernels.build(sees, B=None, H=None, Q_LEN=size[0], KV_LEN=size[1], device=device)

    def _per_slot(self, values_N: Int[Tensor, "N"], block_size: int) -> Int[Tensor, "q"]:
        """A block's value for each of its slots; -1 for padding queries."""
        values_Q = values_N.repeat_interleave(block_size)
        return F.pad(values_Q, (0, self._padded_slots - self._num_slots), value=-1)


def _padded(length: int) -> int:
    """The length rounded up to whole kernel tiles; at least one."""
    return max(1, -(-length // KERNEL_TILE)) * KERNEL_TILE


def _rule(
    *,
    anchor_q: Int[Tensor, "q"],
    document_q: Int[Tensor, "q"],
    documents_t: Int[Tensor, "t"],
    block_size: int,
    window: Int[Tensor, ""],
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask function: which key a query sees, both by their padded index."""
    context_len = len(documents_t)

    @no_type_check  # a checking wrapper would hide the four arguments by which torch tells a mask function
    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        slot = query % block_size
        anchor = anchor_q[query]
        in_document = documents_t[key.clamp(max=context_len - 1)] == document_q[query]
        sees_context = (key < context_len) & (key < anchor) & in_document & (anchor + slot - key < window)
        own = key - context_len
        back = slot - own % block_size
        in_window = (window == _NO_WINDOW) | ((back >= 0) & (back < window))
        return sees_context | ((own >= 0) & (own // block_size == query // block_size) & in_window)

    return sees
