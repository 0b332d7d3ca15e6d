"""Flex attention is the same rule: equal to dense attention in values, and compiled once whatever the anchors are."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

from draftmill.contracts.errors import RecipeError  # noqa: E402
from draftmill.model.attention import DenseAttention  # noqa: E402
from draftmill.model.flex import SMALL_TILES, FlexAttention, FlexKernels, kernel_options  # noqa: E402
from draftmill.model.forms import attention_form  # noqa: E402
from draftmill.model.mask import BlockLayout  # noqa: E402
from draftmill.model.shape import FULL, SLIDING, DrafterShape  # noqa: E402

pytestmark = pytest.mark.torch

HEADS, KV_HEADS, CHANNELS, BLOCK = 4, 2, 16, 4
EAGER = FlexKernels()


def row(lengths: list[int], anchors: list[int], num_padding: int = 0) -> BlockLayout:
    return BlockLayout(
        anchors_N=torch.tensor(anchors + [-1] * num_padding),
        documents_T=torch.tensor([d for d, length in enumerate(lengths) for _ in range(length)]),
        positions_T=torch.tensor([t for length in lengths for t in range(length)]),
        block_size=BLOCK,
    )


def inputs(layout: BlockLayout) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    queries = layout.num_blocks * BLOCK
    shapes = [(HEADS, queries), (KV_HEADS, layout.context_len + queries), (KV_HEADS, layout.context_len + queries)]
    return [torch.randn(*shape, CHANNELS, generator=generator) for shape in shapes]


# 32 and 33 blocks of 4 are 128 and 132 queries; contexts of 1, 127, 128, 129 and 200 tokens stand around the tile.
ROWS = {
    "one token": row([1], [0]),
    "below a tile": row([60, 67], [3, 59, 61, 120]),
    "a tile": row([128], list(range(0, 128, 4)), 0),
    "above a tile": row([129], list(range(0, 129, 4))),
    "three documents, padding blocks": row([90, 10, 100], [5, 89, 92, 100, 180], 3),
    "padding alone": row([5], [], 2),
}


@pytest.mark.parametrize("layout", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("window", [None, 1, 3, 40])
def test_values_are_those_of_dense_attention(layout: BlockLayout, window: int | None) -> None:
    given = inputs(layout)
    found = FlexAttention(layout, [window], EAGER)(*given, window)
    torch.testing.assert_close(found, DenseAttention(layout)(*given, window), atol=2e-6, rtol=1e-5)


def counting(function: Callable) -> tuple[Callable, Callable[[], int]]:
    """The function compiled for constant shapes without generating code, and how often it was."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    return torch.compile(function, backend=counter, dynamic=False), lambda: counter.frame_count


def test_neither_mask_nor_kernel_is_compiled_again_for_other_anchors() -> None:
    torch._dynamo.reset()
    (build, built), (attend, attended) = counting(create_block_mask), counting(flex_attention)
    generator = torch.Generator().manual_seed(0)
    for visit in range(20):
        anchors = torch.randperm(150, generator=generator)[: 5 + visit % 6].sort().values.tolist()
        layout = row([100 + visit, 60 - visit], anchors, num_padding=11 - len(anchors))
        attend_row = FlexAttention(layout, [None, 8], FlexKernels(build, attend))
        for window in (None, 8):
            found = attend_row(*inputs(layout), window)
    torch.testing.assert_close(found, DenseAttention(layout)(*inputs(layout), 8), atol=2e-6, rtol=1e-5)
    assert 1 <= built() <= 2 and 1 <= attended() <= 2


@pytest.mark.parametrize(
    ("capability", "head_dim", "is_small"),
    [((12, 0), 128, True), ((12, 0), 256, True), ((8, 9), 128, True), ((12, 0), 64, False), ((9, 0), 256, False)],
)
def test_cards_with_little_shared_memory_get_small_tiles(
    capability: tuple[int, int], head_dim: int, is_small: bool
) -> None:
    assert kernel_options(capability, head_dim) == (SMALL_TILES if is_small else {})


def test_the_device_decides_the_form_and_flex_is_refused_where_it_cannot_learn() -> None:
    shape = DrafterShape(
        hidden_size=8,
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_positions=64,
        vocab_size=9,
        block_size=BLOCK,
        tap_ids=(0,),
        mask_id=0,
        num_target_layers=4,
        layer_types=(SLIDING, FULL),
        sliding_window=5,
    )
    found = attention_form("auto", shape, torch.device("cpu"))
    assert (found.name, found.windows, found.wants_constant_shapes) == ("grouped", (5, None), False)
    cuda = attention_form("auto", shape, torch.device("cuda"))
    assert (cuda.name, cuda.wants_constant_shapes) == ("flex", True)
    assert isinstance(attention_form("dense", shape, torch.device("cpu")).over(row([4], [1])), DenseAttention)
    with pytest.raises(RecipeError, match="CUDA only"):
        attention_form("flex", shape, torch.device("cpu"))
