"""Who sees whom in the parallel training layout, as tensors. The rule itself is `contracts/blocks.py`.

One row holds T context tokens of one or several documents (keys and values only) and N blocks of B slots. Rows of
the mask are the Q = N * B slots, columns the S = T + Q keys, context first:

    slot (n, i) | context j    j < a_n, same document, and inside the window where the layer slides
    slot (n, i) | slot (m, i') m = n, and i' <= i where the layer slides
    padding block (anchor -1): its own block only
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class BlockLayout:
    """Where the blocks of one row stand: `anchors_N` ascending row indices, padding blocks (-1) last."""

    anchors_N: Int[Tensor, "N"]
    documents_T: Int[Tensor, "T"]
    """The document each context token belongs to; documents follow one another."""
    positions_T: Int[Tensor, "T"]
    """The position each context token has in its own document."""
    block_size: int

    def to(self, device: torch.device) -> "BlockLayout":
        """The same layout on another device."""
        tensors = self.anchors_N.to(device), self.documents_T.to(device), self.positions_T.to(device)
        return BlockLayout(*tensors, self.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks in the row, padding included, N."""
        return len(self.anchors_N)

    @property
    def context_len(self) -> int:
        """Context tokens in the row, T."""
        return len(self.documents_T)

    @property
    def slots_NB(self) -> Int[Tensor, "N B"]:
        """The row index each slot stands for: anchor + slot. Beyond the document's end it is not a token of it."""
        return self.anchors_N[:, None] + torch.arange(self.block_size, device=self.anchors_N.device)

    @property
    def key_positions_S(self) -> Int[Tensor, "S"]:
        """The position of every key: context token j of its document at j, slot i of a block at its anchor's + i."""
        slots = torch.arange(self.block_size, device=self.anchors_N.device)
        starts_N = self.positions_T[self.anchors_N.clamp(min=0)]
        return torch.cat([self.positions_T, (starts_N[:, None] + slots).flatten()])


def one_document(anchors_N: Int[Tensor, "N"], context_len: int, block_size: int) -> BlockLayout:
    """The layout of a row that holds a single document."""
    positions_T = torch.arange(context_len, device=anchors_N.device)
    return BlockLayout(anchors_N, torch.zeros_like(positions_T), positions_T, block_size)


def dense_mask(layout: BlockLayout, window: int | None) -> Bool[Tensor, "Q S"]:
    """The whole mask of a row; `window` is None for full attention layers."""
    everything = slice(0, layout.num_blocks), slice(0, layout.context_len)
    return group_mask(layout, *everything, window)


def group_mask(layout: BlockLayout, blocks: slice, keys: slice, window: int | None) -> Bool[Tensor, "q s"]:
    """The mask of some consecutive blocks over some consecutive context keys followed by these blocks' own slots."""
    context = _sees_context(layout, blocks, keys, window)
    own = _sees_slots(blocks.stop - blocks.start, layout.block_size, window, context.device)
    return torch.cat([context, own], dim=1)


def _sees_context(layout: BlockLayout, blocks: slice, keys: slice, window: int | None) -> Bool[Tensor, "q t"]:
    anchors_N1 = layout.anchors_N[blocks, None]
    keys_t = torch.arange(keys.start, keys.stop, device=anchors_N1.device)
    same_document = layout.documents_T[anchors_N1.clamp(min=0)] == layout.documents_T[keys]
    # A padding block's anchor is -1: nothing lies before it.
    visible_Nt = (keys_t < anchors_N1) & same_document
    visible_NBt = visible_Nt[:, None, :].expand(-1, layout.block_size, -1)
    if window is not None:
        visible_NBt = visible_NBt & (layout.slots_NB[blocks, :, None] - keys_t < window)
    return visible_NBt.flatten(0, 1)


def _sees_slots(num_blocks: int, block_size: int, window: int | None, device: torch.device) -> Bool[Tensor, "q q"]:
    block_q = torch.arange(num_blocks, device=device).repeat_interleave(block_size)
    visible = block_q[:, None] == block_q
    if window is None:
        return visible
    slot_q = torch.arange(block_size, device=device).repeat(num_blocks)
    back = slot_q[:, None] - slot_q
    return visible & (back >= 0) & (back < window)
