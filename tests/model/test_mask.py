"""The torch mask is the block rule of contracts/blocks.py, cell by cell, whatever the row looks like."""

import random

import pytest

torch = pytest.importorskip("torch")
from draftmill.contracts.blocks import PADDING_ANCHOR, slot_sees_context, slot_sees_slot  # noqa: E402
from draftmill.model.mask import BlockLayout, dense_mask, group_mask  # noqa: E402

pytestmark = pytest.mark.torch


def random_layout(rng: random.Random) -> BlockLayout:
    """A row of one to four documents with sorted anchors anywhere in it, and sometimes padding blocks."""
    lengths = [rng.randint(1, 9) for _ in range(rng.randint(1, 4))]
    total = sum(lengths)
    anchors = sorted(rng.sample(range(total), rng.randint(0, min(6, total))))
    anchors += [PADDING_ANCHOR] * rng.randint(0 if anchors else 1, 2)
    return BlockLayout(
        anchors_N=torch.tensor(anchors),
        documents_T=torch.tensor([d for d, length in enumerate(lengths) for _ in range(length)]),
        positions_T=torch.tensor([t for length in lengths for t in range(length)]),
        block_size=rng.randint(2, 5),
    )


def ruled(layout: BlockLayout, window: int | None) -> list[list[bool]]:
    """The mask as the plain rule says it."""
    anchors, documents, size = layout.anchors_N.tolist(), layout.documents_T.tolist(), layout.block_size
    slots = [(n, i) for n in range(len(anchors)) for i in range(size)]
    return [
        [slot_sees_context(anchors[n], i, j, documents, window) for j in range(len(documents))]
        + [slot_sees_slot(n, i, m, k, window) for m, k in slots]
        for n, i in slots
    ]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_every_cell_of_the_dense_mask_is_the_plain_rule(seed: int, window: int | None) -> None:
    layout = random_layout(random.Random(seed))
    assert dense_mask(layout, window).tolist() == ruled(layout, window)


def test_no_query_sees_nothing() -> None:
    for seed in range(40):
        assert dense_mask(random_layout(random.Random(seed)), 2).any(dim=1).all()


def test_a_group_mask_is_the_dense_mask_cut_out() -> None:
    layout = random_layout(random.Random(3))
    size, context = layout.block_size, layout.context_len
    part = group_mask(layout, slice(1, layout.num_blocks), slice(2, context), None)
    rows = slice(size, layout.num_blocks * size)
    whole = dense_mask(layout, None)[rows]
    assert torch.equal(part, torch.cat([whole[:, 2:context], whole[:, context + size :]], dim=1))


def test_positions_restart_with_every_document() -> None:
    layout = BlockLayout(torch.tensor([1, 4]), torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 0, 1]), 3)
    assert layout.key_positions_S.tolist() == [0, 1, 2, 0, 1, 1, 2, 3, 1, 2, 3]
