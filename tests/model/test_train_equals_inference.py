"""What is trained is what runs: the parallel layout gives the logits of cached decoding, and every classic fault shows.

A random tiny target is read once for training and once more, token by token through its own cache, for decoding. The
drafter sees the same anchors both ways.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from transformers import DynamicCache  # noqa: E402

from draftmill.extract.taps import TapReader  # noqa: E402
from draftmill.extract.target import Target, load_target  # noqa: E402
from draftmill.model.attention import Attend, DenseAttention, masked_attention  # noqa: E402
from draftmill.model.cache import DraftCache  # noqa: E402
from draftmill.model.drafter import Drafter  # noqa: E402
from draftmill.model.grouped import GroupedAttention  # noqa: E402
from draftmill.model.mask import BlockLayout, dense_mask, one_document  # noqa: E402
from draftmill.model.shape import DrafterShape  # noqa: E402
from tiny import write_tiny_target  # noqa: E402

pytestmark = pytest.mark.torch

BLOCK, WINDOW, MASK_ID, LENGTH = 4, 6, 270, 40
TAPS = (0, 2, 4)
ANCHORS = (3, 5, 6, 11, 20, 21, 33)
KINDS = {
    "full": ("full_attention",) * 2,
    "sliding": ("sliding_attention",) * 2,
    "mixed": ("sliding_attention", "full_attention"),
}
CLOSE = 1e-5


@dataclass(frozen=True)
class Bench:
    """A target, a drafter on it, one document, and the logits that decoding gives at `ANCHORS`."""

    target: Target
    drafter: Drafter
    ids_T: torch.Tensor
    decoded_NJV: torch.Tensor


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder: Path = tmp_path_factory.mktemp("target")
    return load_target(write_tiny_target(folder, family="qwen3"))


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def bench(request: pytest.FixtureRequest, target: Target) -> Bench:
    torch.manual_seed(5)
    shape = DrafterShape(
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        rms_norm_eps=1e-6,
        rope_theta=target.rope_theta,
        max_positions=512,
        vocab_size=target.vocab_size,
        block_size=BLOCK,
        tap_ids=TAPS,
        mask_id=MASK_ID,
        num_target_layers=target.num_layers,
        layer_types=request.param,
        sliding_window=WINDOW if "sliding_attention" in request.param else None,
    )
    drafter = Drafter(shape)
    ids_T = torch.randint(0, 256, (LENGTH,))
    return Bench(target, drafter, ids_T, decoded(target, drafter, ids_T))


@torch.no_grad()
def decoded(target: Target, drafter: Drafter, ids_T: torch.Tensor) -> torch.Tensor:
    """Drafts at every anchor with growing caches on both sides, as decoding and engines do."""
    reader, cache = TapReader(target, TAPS), DraftCache()
    past, start, logits = DynamicCache(config=target.model.config), 0, []
    for anchor in ANCHORS:
        with reader.capturing() as captured:
            target.model(ids_T[None, start:anchor], None, None, past, use_cache=True)
        block = torch.tensor([int(ids_T[anchor]), *[MASK_ID] * (BLOCK - 1)])
        hidden = drafter.draft(cache, captured.features()[0], start, target.embed(block))
        logits.append(target.head(hidden[1:]))
        start = anchor
        assert cache.length == anchor
    return torch.stack(logits)


Change = Callable[[BlockLayout], Attend]


@torch.no_grad()
def trained(
    bench: Bench,
    *,
    attend_of: Change | None = None,
    taps: tuple[int, ...] = TAPS,
    position_shift: int = 0,
) -> torch.Tensor:
    """Logits of slots 1 .. B - 1 in the parallel layout; the keywords inject faults."""
    lengths = torch.tensor([LENGTH])
    features = TapReader(bench.target, taps).read(bench.ids_T[None], lengths)[0]
    anchors = torch.tensor(ANCHORS)
    layout = one_document(anchors, LENGTH, BLOCK)
    block_ids = torch.full((len(ANCHORS), BLOCK), MASK_ID)
    block_ids[:, 0] = bench.ids_T[anchors]
    attend = attend_of(layout) if attend_of else GroupedAttention(layout, bench.drafter.shape.windows)
    seen = layout if not position_shift else ShiftedBlocks(**vars(layout))
    context = bench.drafter.project(features)
    hidden = bench.drafter(bench.target.embed(block_ids).flatten(0, 1), context, seen, attend)
    return bench.target.head(hidden.unflatten(0, block_ids.shape)[:, 1:])


class ShiftedBlocks(BlockLayout):
    """The fault: blocks stand one position too far right."""

    @property
    def key_positions_S(self) -> torch.Tensor:
        positions = super().key_positions_S.clone()
        positions[self.context_len :] += 1
        return positions


def masked_by(change: Callable[[BlockLayout, torch.Tensor], torch.Tensor], layout: BlockLayout) -> Attend:
    """Dense attention under a changed mask."""

    def attend(queries, keys, values, window):
        return masked_attention(queries, keys, values, change(layout, dense_mask(layout, window)))

    return attend


def sees_its_anchors_feature(layout: BlockLayout, mask: torch.Tensor) -> torch.Tensor:
    """The fault: context `<=` anchor."""
    changed = mask.clone()
    for n, anchor in enumerate(layout.anchors_N.tolist()):
        changed[n * BLOCK : (n + 1) * BLOCK, anchor] = True
    return changed


def sees_the_next_block(layout: BlockLayout, mask: torch.Tensor) -> torch.Tensor:
    """The fault: another block's slots are visible."""
    changed = mask.clone()
    own = changed[:, layout.context_len :]
    own[:-BLOCK, BLOCK:] |= own[BLOCK:, BLOCK:].clone()
    return changed


def worst(bench: Bench, logits: torch.Tensor) -> float:
    return float((logits - bench.decoded_NJV).abs().max())


def test_training_logits_equal_those_of_cached_decoding(bench: Bench) -> None:
    assert worst(bench, trained(bench)) < CLOSE
    assert worst(bench, trained(bench, attend_of=DenseAttention)) < CLOSE
    assert bench.decoded_NJV.std() > 0.1


def test_context_up_to_and_including_the_anchor_is_seen_as_a_fault(bench: Bench) -> None:
    assert worst(bench, trained(bench, attend_of=partial(masked_by, sees_its_anchors_feature))) > 100 * CLOSE


def test_a_tap_one_layer_too_low_is_seen_as_a_fault(bench: Bench) -> None:
    assert worst(bench, trained(bench, taps=(0, 1, 4))) > 100 * CLOSE


def test_blocks_one_position_too_far_are_seen_as_a_fault(bench: Bench) -> None:
    assert worst(bench, trained(bench, position_shift=1)) > 100 * CLOSE


def test_labels_shifted_by_one_are_seen_as_a_fault(bench: Bench) -> None:
    logits = trained(bench)
    assert float((logits[:, 1:] - bench.decoded_NJV[:, :-1]).abs().max()) > 100 * CLOSE


def test_another_visible_block_is_seen_as_a_fault(bench: Bench) -> None:
    assert worst(bench, trained(bench, attend_of=partial(masked_by, sees_the_next_block))) > 100 * CLOSE


def test_features_at_or_after_an_anchor_do_not_reach_its_block(bench: Bench) -> None:
    features = torch.randn(LENGTH, len(TAPS) * 64)
    anchors = torch.tensor(ANCHORS)
    layout = one_document(anchors, LENGTH, BLOCK)
    embeds = torch.randn(len(ANCHORS) * BLOCK, 64)
    attend = GroupedAttention(layout, bench.drafter.shape.windows)

    def blocks(features: torch.Tensor) -> torch.Tensor:
        hidden = bench.drafter(embeds, bench.drafter.project(features), layout, attend)
        return hidden.unflatten(0, (len(ANCHORS), BLOCK))

    with torch.no_grad():
        before = blocks(features)
        for n, anchor in enumerate(ANCHORS):
            changed = features.clone()
            changed[anchor:] += 3.0
            after = blocks(changed)
            torch.testing.assert_close(after[: n + 1], before[: n + 1], atol=CLOSE, rtol=0)
            assert n + 1 == len(ANCHORS) or not torch.allclose(after[-1], before[-1])


def test_packed_documents_are_drafted_as_if_alone(bench: Bench) -> None:
    first, second = torch.randn(9, len(TAPS) * 64), torch.randn(14, len(TAPS) * 64)
    embeds = torch.randn(2 * BLOCK, 64)

    def run(features: torch.Tensor, embeds: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        attend = GroupedAttention(layout, bench.drafter.shape.windows)
        return bench.drafter(embeds, bench.drafter.project(features), layout, attend)

    alone = [
        run(first, embeds[:BLOCK], one_document(torch.tensor([6]), 9, BLOCK)),
        run(second, embeds[BLOCK:], one_document(torch.tensor([3]), 14, BLOCK)),
    ]
    packed = BlockLayout(
        anchors_N=torch.tensor([6, 9 + 3]),
        documents_T=torch.tensor([0] * 9 + [1] * 14),
        positions_T=torch.cat([torch.arange(9), torch.arange(14)]),
        block_size=BLOCK,
    )
    together = run(torch.cat([first, second]), embeds, packed)
    torch.testing.assert_close(together, torch.cat(alone), atol=CLOSE, rtol=0)
    one_long = replace(packed, documents_T=torch.zeros(23, dtype=torch.long))
    assert not torch.allclose(run(torch.cat([first, second]), embeds, one_long), torch.cat(alone), atol=CLOSE)
