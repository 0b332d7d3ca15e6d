"""A batch is a function of its planned row: labels are the text, a block ends with its supervised run and document."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from draftmill.contracts.blocks import num_supervised_slots  # noqa: E402
from draftmill.extract.taps import TapReader  # noqa: E402
from draftmill.extract.target import load_target  # noqa: E402
from draftmill.model.grouped import GroupedAttention  # noqa: E402
from draftmill.model.mask import dense_mask  # noqa: E402
from draftmill.model.shape import DrafterShape  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.train.batches import (  # noqa: E402
    Batch,
    Batches,
    BatchRule,
    pack,
    run_ends,
)
from draftmill.train.features import DocumentStates, OwnTarget, TargetFeatures, length_buckets  # noqa: E402
from draftmill.train.gate import KeptSample  # noqa: E402
from draftmill.train.rows import PlannedRow, RowPlan  # noqa: E402
from draftmill.train.samples import IntArray, Sample, SampleSet  # noqa: E402
from sample_sets import GivenSample, open_samples, write_samples  # noqa: E402
from tiny import write_tiny_target  # noqa: E402
from tiny_drafter import random_drafter  # noqa: E402

pytestmark = pytest.mark.torch

BLOCK, MASK_ID = 4, 99
SHAPE = DrafterShape(
    hidden_size=2,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    intermediate_size=2,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=64,
    vocab_size=100,
    block_size=BLOCK,
    tap_ids=(0,),
    mask_id=MASK_ID,
    num_target_layers=4,
    layer_types=("full_attention",),
)


class CountedFeatures:
    """Features that say which token they belong to."""

    def states_of(self, samples: Sequence[Sample]) -> list[DocumentStates]:
        counted = [torch.tensor(sample.input_ids.tolist()).float()[:, None].expand(-1, 2) for sample in samples]
        return [DocumentStates(features, features + 0.5) for features in counted]


def sample(name: str, mask: Sequence[bool], first_token: int) -> Sample:
    return Sample(name, np.arange(first_token, first_token + len(mask)), np.array(mask))


def batch_of(docs: Sequence[Sample], anchors: Sequence[IntArray], rule: BatchRule | None = None) -> Batch:
    packed = pack(docs, anchors, BLOCK)
    return (packed.filled(rule) if rule else packed).with_states(CountedFeatures().states_of(docs), MASK_ID)


def size_of(num_drafters: int = 1, **changed: object) -> BatchRule:
    chosen = {"max_tokens": 64, "num_anchors": 16, **changed}
    settings = TrainSettings(input="i", output=("o",), target="t", **chosen)  # type: ignore[arg-type]
    return BatchRule.of(settings, is_constant=False, num_drafters=num_drafters)


def test_a_block_never_goes_on_into_the_next_document() -> None:
    first, second = sample("a", [False] * 4 + [True] * 6, 10), sample("b", [True] * 7, 30)
    batch = batch_of([first, second], [np.array([8]), np.array([0, 5])])
    assert batch.layout.anchors_N.tolist() == [8, 10, 15]
    assert batch.block_ids_NB.tolist() == [[18, 99, 99, 99], [30, 99, 99, 99], [35, 99, 99, 99]]
    assert batch.supervised_NJ.tolist() == [[True, False, False], [True, True, True], [True, False, False]]
    assert batch.labels_NJ[:, 0].tolist() == [19, 31, 36]
    assert batch.labels_NJ[1].tolist() == [31, 32, 33]
    assert batch.features_TF[:, 0].tolist() == [*range(10, 20), *range(30, 37)]
    assert batch.layout.positions_T.tolist() == [*range(10), *range(7)]
    assert batch.layout.documents_T.tolist() == [0] * 10 + [1] * 7


@pytest.mark.parametrize("seed", range(20))
def test_anchors_slots_and_tokens_are_those_of_the_block_rule(seed: int) -> None:
    rng = random.Random(seed)
    docs = [sample(f"d{i}", [rng.random() < 0.7 for _ in range(rng.randint(3, 15))], 0) for i in range(3)]
    anchors = [np.flatnonzero(doc.loss_mask[:-1] & doc.loss_mask[1:]) for doc in docs]
    batch = batch_of(docs, anchors)
    mask = [bool(m) for doc in docs for m in doc.loss_mask]
    tokens = [int(t) for doc in docs for t in doc.input_ids]
    documents = batch.layout.documents_T.tolist()
    triples = [
        (anchor, slot, tokens[anchor + slot])
        for anchor in batch.layout.anchors_N.tolist()
        for slot in range(1, num_supervised_slots(anchor, mask, documents, BLOCK) + 1)
    ]
    found = [
        (int(batch.layout.anchors_N[n]), int(j) + 1, int(batch.labels_NJ[n, j]))
        for n, j in batch.supervised_NJ.nonzero().tolist()
    ]
    assert found == triples
    # What says the token at a + i is the state one position before it.
    says = [documents_token + 0.5 for documents_token in (tokens[anchor + slot - 1] for anchor, slot, _ in triples)]
    assert batch.last_PH is not None and batch.last_PH[:, 0].tolist() == says


def test_runs_end_where_supervision_does() -> None:
    assert run_ends(np.array([False, True, True, False, True])).tolist() == [0, 3, 3, 3, 5]


def test_anchors_of_a_sample_do_not_depend_on_its_company(tmp_path: Path) -> None:
    given: list[GivenSample] = [(f"s{i}", [5] * 30, [True] * 30) for i in range(4)]
    samples = SampleSet(open_samples(write_samples(tmp_path, given, "hash")))
    batches = Batches(samples, OwnTarget(CountedFeatures()), SHAPE, 7, size_of())
    alone = batches.batch_at(PlannedRow(2, (3,), (30,), (6,))).layout.anchors_N.tolist()
    together = batches.batch_at(PlannedRow(2, (1, 3, 0), (30, 30, 30), (4, 6, 4))).layout.anchors_N.tolist()
    assert [a - 30 for a in together if 30 <= a < 60] == alone
    assert batches.batch_at(PlannedRow(3, (3,), (30,), (6,))).layout.anchors_N.tolist() != alone


def test_filling_up_to_constant_shapes_adds_nothing_that_is_seen_or_learnt() -> None:
    docs = [sample("b", [True] * 7, 30), sample("a", [False] * 4 + [True] * 6, 10)]
    anchors = [np.array([0, 5]), np.array([8])]
    plain = batch_of(docs, anchors)
    filled = batch_of(docs, anchors, replace(size_of(), max_tokens=25, num_anchors=6, is_constant=True))
    assert filled.layout.anchors_N.tolist() == [0, 5, 15, -1, -1, -1]
    assert (filled.layout.context_len, filled.features_TF.shape[0], filled.labels_NJ.shape) == (25, 25, (6, 3))
    assert torch.equal(filled.supervised_NJ[:3], plain.supervised_NJ) and not filled.supervised_NJ[3:].any()
    assert torch.equal(filled.labels_NJ[:3][plain.supervised_NJ], plain.labels_NJ[plain.supervised_NJ])
    assert filled.block_ids_NB[3:].eq(MASK_ID).all()
    for window in (None, 3):
        whole, mask = dense_mask(plain.layout, window), dense_mask(filled.layout, window)
        queries = whole.shape[0]
        assert torch.equal(mask[:queries, :17], whole[:, :17]) and not mask[:queries, 17:25].any()
        assert torch.equal(mask[:queries, 25 : 25 + queries], whole[:, 17:])
    drafter = random_drafter(SHAPE)
    embeds = torch.randn(100, 2)

    def hidden(batch: Batch) -> torch.Tensor:
        attend = GroupedAttention(batch.layout, [None])
        return drafter(
            embeds[batch.block_ids_NB].flatten(0, 1), drafter.project(batch.features_TF), batch.layout, attend
        )

    torch.testing.assert_close(hidden(filled)[: 3 * BLOCK], hidden(plain), atol=1e-6, rtol=1e-5)
    assert hidden(filled).isfinite().all()


# One of two drafter ranks has two of four rows of a step, and two or one of three.
@pytest.mark.parametrize(("rows_per_step", "num_drafters"), [(2, 1), (4, 2), (3, 2)])
def test_further_draws_of_a_visit_ask_the_target_once_and_have_anchors_of_their_own(
    tmp_path: Path, rows_per_step: int, num_drafters: int
) -> None:
    given: list[GivenSample] = [(f"s{i}", [5] * 30, [True] * 30) for i in range(4)]
    samples = SampleSet(open_samples(write_samples(tmp_path, given, "hash")))
    asked: list[list[str]] = []

    class Counting(CountedFeatures):
        def states_of(self, samples: Sequence[Sample]) -> list[DocumentStates]:
            asked.append([s.id for s in samples])
            return super().states_of(samples)

    rule = size_of(num_drafters, draws_per_pass=3, rows_per_step=rows_per_step)
    batches = Batches(samples, OwnTarget(Counting()), SHAPE, 7, rule)
    rows = [PlannedRow(0, (i,), (30,), (6,), draw) for draw in range(3) for i in (0, 1)]
    anchors = [batches.batch_at(row).layout.anchors_N.tolist() for row in rows]
    assert asked == [["s0"], ["s1"]]
    assert len({tuple(a) for a in anchors}) == 6
    batches.batch_at(PlannedRow(0, (2,), (30,), (6,)))
    batches.batch_at(PlannedRow(0, (1,), (30,), (6,), 1))
    batches.batch_at(PlannedRow(0, (0,), (30,), (6,), 1))
    assert asked[2:] == [["s2"], ["s0"]]  # s0 made room for s2
    alone = Batches(samples, OwnTarget(Counting()), SHAPE, 7, size_of())
    assert alone.batch_at(rows[5]).layout.anchors_N.tolist() == anchors[5]


def test_a_sample_is_read_up_to_the_length_that_is_trained_on(tmp_path: Path) -> None:
    given: list[GivenSample] = [(f"s{i}", list(range(90)), [True] * 90) for i in range(2)]
    samples = SampleSet(open_samples(write_samples(tmp_path, given, "hash")))
    row = PlannedRow(0, (1,), (50,), (49,))
    batch = Batches(samples, OwnTarget(CountedFeatures()), SHAPE, 7, size_of()).batch_at(row)
    assert batch.layout.context_len == 50
    assert batch.layout.anchors_N.tolist() == list(range(49))
    assert batch.supervised_NJ[-1].tolist() == [True, False, False]


def story_lengths(count: int) -> list[int]:
    """Lengths as the story's: log-normal with mean 2,068 and 95th percentile 4,300, at most 10,800."""
    drawn = np.random.default_rng(0).lognormal(mean=7.493, sigma=0.531, size=count)
    return np.clip(drawn, 20, 10_800).astype(int).tolist()


@pytest.mark.parametrize("max_tokens", [3_072, 10_800, 65_536])
def test_padding_is_at_most_a_twentieth_on_the_storys_lengths(max_tokens: int) -> None:
    lengths = [min(length, max_tokens) for length in story_lengths(4_000)]
    assert 1_900 < np.mean(story_lengths(4_000)) < 2_200
    kept = tuple(KeptSample(i, length, length - 1) for i, length in enumerate(lengths))
    settings = TrainSettings(input="i", output=("o",), target="t", max_tokens=max_tokens)
    plan = RowPlan(1, lambda _part: kept, settings)
    padded = tokens = 0
    for step in range(plan.num_steps(1)):
        in_row = [lengths[i] for row in plan.micros_of(step) for i in row.samples]
        buckets = length_buckets(in_row, max_tokens)
        assert sorted(i for bucket in buckets for i in bucket) == list(range(len(in_row)))
        sizes = [len(bucket) * max(in_row[i] for i in bucket) for bucket in buckets]
        assert max(sizes) <= max_tokens
        padded, tokens = padded + sum(sizes), tokens + sum(in_row)
    assert tokens >= sum(lengths)
    assert padded - tokens <= 0.05 * padded


def test_target_batches_of_like_lengths_are_few() -> None:
    lengths = [random.Random(i).randint(10, 90) for i in range(40)]
    assert len(length_buckets(lengths, max_tokens=400)) <= 20
    assert length_buckets([50] * 8, max_tokens=400) == [list(range(8))]


def features_of(source: TargetFeatures, samples: Sequence[Sample]) -> list[torch.Tensor]:
    return [states.features_TF for states in source.states_of(samples)]


def test_features_in_a_bucket_alone_and_from_memory_are_the_targets(tmp_path: Path) -> None:
    reader = TapReader(load_target(write_tiny_target(tmp_path)), (0, 3))
    samples = [sample(f"s{n}", [True] * n, 5) for n in (20, 7, 22, 21)]
    cpu = torch.device("cpu")
    bucketed = features_of(TargetFeatures(reader, cpu, max_tokens=100, cache_bytes=0), samples)
    caching = TargetFeatures(reader, cpu, max_tokens=100, cache_bytes=21_000)
    first, again = features_of(caching, samples), features_of(caching, samples)
    for doc, one, other, kept in zip(samples, bucketed, first, again, strict=True):
        ids = torch.from_numpy(doc.input_ids)[None]
        plain = reader.read(ids, torch.tensor([len(doc.input_ids)]))[0]
        torch.testing.assert_close(one, plain, atol=1e-5, rtol=1e-5)
        assert torch.equal(other, plain) and torch.equal(kept, plain)
    # 21,000 bytes hold 20 + 7 tokens of 512 bytes, and no other sample fits.
    assert [a is b for a, b in zip(first, again, strict=True)] == [True, True, False, False]


def test_any_sample_can_be_had_by_its_index(tmp_path: Path) -> None:
    given: list[GivenSample] = [
        (f"s{i}", list(range(i, 2 * i + 2)), [t % 2 == 0 for t in range(i + 2)]) for i in range(11)
    ]
    samples = SampleSet(open_samples(write_samples(tmp_path, given, "hash", num_parts=3)))
    assert samples.start_of(3) == 11
    for i in (10, 0, 4, 3):
        assert samples[i].id == f"s{i}"
        assert samples[i].input_ids.tolist() == given[i][1]
        assert samples[i].loss_mask.tolist() == given[i][2]
    flat = [token for part in range(3) for batch in samples.batches(part) for token in batch.input_ids.tolist()]
    assert flat == [token for _, ids, _ in given for token in ids]


def test_rows_are_filled_up_to_no_more_blocks_than_they_can_hold() -> None:
    assert size_of(num_anchors=10**9, max_tokens=100).num_anchors == 100
    assert size_of(num_anchors=7, max_tokens=100).num_anchors == 7
