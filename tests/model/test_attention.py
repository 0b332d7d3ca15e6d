"""Grouped attention is dense attention, in values and in gradients, for rows of many documents and several groups."""

import pytest

torch = pytest.importorskip("torch")
from draftmill.model import attention  # noqa: E402
from draftmill.model.attention import DenseAttention  # noqa: E402
from draftmill.model.grouped import BLOCKS_PER_GROUP, GroupedAttention  # noqa: E402
from draftmill.model.mask import BlockLayout  # noqa: E402

pytestmark = pytest.mark.torch

HEADS, KV_HEADS, CHANNELS, BLOCK = 4, 2, 8, 3


def long_row(num_padding: int) -> BlockLayout:
    """Three documents, more blocks than one group takes."""
    lengths = (30, 41, 25)
    anchors = [t for t in range(sum(lengths)) if t % 5]
    assert len(anchors) > 2 * BLOCKS_PER_GROUP
    return BlockLayout(
        anchors_N=torch.tensor(anchors + [-1] * num_padding),
        documents_T=torch.tensor([d for d, length in enumerate(lengths) for _ in range(length)]),
        positions_T=torch.tensor([t for length in lengths for t in range(length)]),
        block_size=BLOCK,
    )


def attended(
    attend: attention.Attend, layout: BlockLayout, window: int | None, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """The output and the gradients of queries, keys and values for one fixed random case."""
    generator = torch.Generator().manual_seed(1)
    queries = layout.num_blocks * BLOCK
    shapes = [(HEADS, queries), (KV_HEADS, layout.context_len + queries), (KV_HEADS, layout.context_len + queries)]
    inputs = [torch.randn(*shape, CHANNELS, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    output = attend(*inputs, window)
    output.backward(torch.randn(output.shape, generator=generator).to(dtype))
    return [output.detach(), *(tensor.grad for tensor in inputs)]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("num_padding", [0, 5])
def test_grouped_attention_equals_dense_attention(window: int | None, num_padding: int) -> None:
    layout = long_row(num_padding)
    dense = attended(DenseAttention(layout), layout, window)
    grouped = attended(GroupedAttention(layout, [window]), layout, window)
    for one, other in zip(dense, grouped, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


def test_a_row_of_padding_blocks_alone_attends_to_itself() -> None:
    layout = BlockLayout(torch.tensor([-1, -1]), torch.zeros(4, dtype=torch.long), torch.arange(4), BLOCK)
    output, *grads = attended(GroupedAttention(layout, [None]), layout, None)
    assert all(tensor.isfinite().all() for tensor in (output, *grads))
    assert grads[1][:, :4].eq(0).all()


def test_query_heads_read_their_own_key_value_head() -> None:
    queries, keys = torch.randn(4, 2, 8), torch.randn(2, 3, 8)
    values = torch.stack([torch.zeros(3, 8), torch.ones(3, 8)])
    output = attention.masked_attention(queries, keys, values, None)
    torch.testing.assert_close(output, torch.tensor([0.0, 0, 1, 1])[:, None, None].expand(4, 2, 8))


def test_in_bfloat16_values_and_gradients_err_no_more_than_dense_attention_does() -> None:
    layout = long_row(0)
    truth = attended(DenseAttention(layout), layout, None)
    for attend in (DenseAttention(layout), GroupedAttention(layout, [None])):
        narrow = attended(attend, layout, None, torch.bfloat16)
        for one, other in zip(narrow, truth, strict=True):
            assert one.dtype == torch.bfloat16
            assert (one.float() - other).norm() < 0.01 * other.norm()


def test_memory_of_a_step_does_not_grow_with_the_scores() -> None:
    """What is kept for the backward pass is as large as queries, keys and values, however many keys a query sees."""
    kept: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    layout = long_row(0)
    slots, keys = layout.num_blocks * BLOCK, layout.context_len + layout.num_blocks * BLOCK
    queries = torch.randn(HEADS, slots, CHANNELS, requires_grad=True)
    states = torch.randn(KV_HEADS, keys, CHANNELS, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        GroupedAttention(layout, [None])(queries, states, states, None)
    assert sum(kept) == 2 * queries.numel() + 2 * states.numel() + HEADS * slots < HEADS * slots * keys / 4
