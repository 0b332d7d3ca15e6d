"""An anchor's logits depend on the context before it and on nothing else: not a bit changes when the rest does.

Run against the real path from tokens to logits: target, taps, packing, drafter, head. A drafter that looks accepted
almost always on held-out text is to be held against this check first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from draftmill.extract.taps import TapReader  # noqa: E402
from draftmill.extract.target import Target, load_target  # noqa: E402
from draftmill.model.attention import Attend, DenseAttention  # noqa: E402
from draftmill.model.drafter import Drafter  # noqa: E402
from draftmill.model.flex import FlexAttention, FlexKernels  # noqa: E402
from draftmill.model.grouped import GroupedAttention  # noqa: E402
from draftmill.model.mask import BlockLayout  # noqa: E402
from draftmill.train.batches import Batch, pack  # noqa: E402
from draftmill.train.features import TargetFeatures  # noqa: E402
from draftmill.train.samples import Sample  # noqa: E402
from tiny import write_tiny_target  # noqa: E402
from tiny_drafter import MASK_ID, random_drafter, tiny_shape  # noqa: E402

pytestmark = pytest.mark.torch

BLOCK, WINDOW = 4, 6
LENGTHS = (20, 25)
ANCHORS = ([4, 9, 17], [2, 3, 11, 23])
FORMS: dict[str, Callable[[BlockLayout], Attend]] = {
    "dense": DenseAttention,
    "grouped": lambda layout: GroupedAttention(layout, [None, WINDOW]),
    "flex": lambda layout: FlexAttention(layout, [None, WINDOW], FlexKernels()),
}


@dataclass(frozen=True)
class Bench:
    target: Target
    drafter: Drafter
    attend_of: Callable[[BlockLayout], Attend]

    def batch(self, ids: list[np.ndarray]) -> Batch:
        docs = [Sample(f"d{i}", tokens, np.ones(len(tokens), dtype=np.bool_)) for i, tokens in enumerate(ids)]
        reader = TapReader(self.target, self.drafter.shape.tap_ids)
        source = TargetFeatures(reader, self.target.device, max_tokens=100, cache_bytes=0)
        packed = pack(docs, [np.array(a) for a in ANCHORS], BLOCK)
        return packed.with_states(source.states_of(docs), MASK_ID)

    @torch.no_grad()
    def logits(self, batch: Batch) -> torch.Tensor:
        """Of every slot of every block, [N, B, V]."""
        embeds = self.target.embed(batch.block_ids_NB).flatten(0, 1)
        context = self.drafter.project(batch.features_TF)
        hidden = self.drafter(embeds, context, batch.layout, self.attend_of(batch.layout))
        return self.target.head(hidden).unflatten(0, batch.block_ids_NB.shape)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder: Path = tmp_path_factory.mktemp("target")
    return load_target(write_tiny_target(folder, family="qwen3"))


@pytest.fixture(scope="module", params=FORMS.values(), ids=FORMS)
def bench(request: pytest.FixtureRequest, target: Target) -> Bench:
    shape = tiny_shape(target, block_size=BLOCK, num_layers=2, window=WINDOW)
    return Bench(target, random_drafter(shape), request.param)


def texts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, length) for length in LENGTHS]


def with_features(batch: Batch, features_TF: torch.Tensor) -> Batch:
    return Batch(features_TF, batch.block_ids_NB, batch.layout, batch.labels_NJ, batch.supervised_NJ)


def test_tokens_after_an_anchor_do_not_reach_its_block(bench: Bench) -> None:
    before = bench.logits(bench.batch(texts()))
    for document, anchors in enumerate(ANCHORS):
        for at, anchor in enumerate(anchors):
            changed = texts()
            changed[document][anchor + 1 :] = (changed[document][anchor + 1 :] + 7) % 256
            after = bench.logits(bench.batch(changed))
            block = at + len(ANCHORS[0]) * document
            assert torch.equal(after[block], before[block])
            if at + 1 < len(anchors):  # and the change was one: a later block of the document sees it
                assert not torch.equal(after[block + 1], before[block + 1])


def test_features_at_or_after_an_anchor_and_of_other_documents_do_not_reach_its_block(bench: Bench) -> None:
    batch = bench.batch(texts())
    before = bench.logits(batch)
    documents = batch.layout.documents_T
    for block, anchor in enumerate(batch.layout.anchors_N.tolist()):
        is_seen_T = (torch.arange(len(documents)) < anchor) & (documents == documents[anchor])
        features = torch.where(is_seen_T[:, None], batch.features_TF, batch.features_TF + 5.0)
        assert torch.equal(bench.logits(with_features(batch, features))[block], before[block])
        features = batch.features_TF.clone()
        features[anchor - 1] += 5.0
        assert not torch.equal(bench.logits(with_features(batch, features))[block], before[block])


def test_other_blocks_do_not_reach_a_block(bench: Bench) -> None:
    batch = bench.batch(texts())
    before = bench.logits(batch)
    for block in range(len(before)):
        changed = batch.block_ids_NB + 1
        changed[block] = batch.block_ids_NB[block]
        other = Batch(batch.features_TF, changed, batch.layout, batch.labels_NJ, batch.supervised_NJ)
        after = bench.logits(other)
        assert torch.equal(after[block], before[block])
        assert sum(torch.equal(a, b) for a, b in zip(after, before, strict=True)) == 1
