"""The block rule in plain Python: who sees whom, what is an anchor, which slots are learnt from.

Every torch mask is tested cell by cell against this file. One row holds T context tokens (keys and values only)
and N blocks of B slots (queries, keys and values):

    query            key                visible when
    slot (n, i)      context j          j < a_n, same document, inside the window where the layer slides
    slot (n, i)      slot (m, i')       m = n, and i' <= i where the layer slides (then inside the window too)
    padding block    anything           its own block only, so that no query sees nothing

Slot 0 holds the anchor, a known token whose target feature does not exist yet at inference: hence `j < a_n`, strictly.
Follows DFlash (arXiv 2602.06036, section 4.2) and dflash.md section 3.
"""

from collections.abc import Sequence

PADDING_ANCHOR = -1


def slot_sees_context(anchor: int, slot: int, key: int, documents: Sequence[int], window: int | None = None) -> bool:
    """Whether slot `slot` of the block anchored at row index `anchor` sees context token `key`.

    `documents[j]` is the document that row index j belongs to; `window` is None on full attention layers.
    """
    if anchor == PADDING_ANCHOR:
        return False
    in_window = window is None or anchor + slot - key < window
    return key < anchor and documents[key] == documents[anchor] and in_window


def slot_sees_slot(block: int, slot: int, key_block: int, key_slot: int, window: int | None = None) -> bool:
    """Whether slot `slot` of block `block` sees slot `key_slot` of block `key_block`; a sliding layer is causal."""
    if block != key_block:
        return False
    return window is None or 0 <= slot - key_slot < window


def anchor_positions(loss_mask: Sequence[bool], documents: Sequence[int]) -> list[int]:
    """Row indices that can be an anchor: supervised, and followed by a supervised token of the same document."""
    return [
        t for t in range(len(loss_mask) - 1) if loss_mask[t] and loss_mask[t + 1] and documents[t] == documents[t + 1]
    ]


def num_supervised_slots(anchor: int, loss_mask: Sequence[bool], documents: Sequence[int], block_size: int) -> int:
    """How many slots after slot 0 are learnt from: the unbroken supervised run behind the anchor, at most B - 1."""
    count = 0
    while (
        count < block_size - 1
        and anchor + count + 1 < len(loss_mask)
        and loss_mask[anchor + count + 1]
        and documents[anchor + count + 1] == documents[anchor]
    ):
        count += 1
    return count
