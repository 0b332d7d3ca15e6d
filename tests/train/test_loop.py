"""Promises of the loop: one mean however a step is cut, float32 masters that move, bad steps skipped, overfitting."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from draftmill.contracts.acceptance import num_accepted  # noqa: E402
from draftmill.extract.taps import TapReader  # noqa: E402
from draftmill.extract.target import Target, load_target  # noqa: E402
from draftmill.model.attention import DenseAttention  # noqa: E402
from draftmill.model.cache import DraftCache  # noqa: E402
from draftmill.model.forms import attention_form  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.train.anchors import draw_anchors  # noqa: E402
from draftmill.train.batches import Batch, pack  # noqa: E402
from draftmill.train.features import TargetFeatures  # noqa: E402
from draftmill.train.layout import Layout  # noqa: E402
from draftmill.train.loop import DivergedError, LossOf, Schedule, refuse_unsound, train  # noqa: E402
from draftmill.train.metrics import StepSums  # noqa: E402
from draftmill.train.ranks import Ranks, alone  # noqa: E402
from draftmill.train.rows import PlannedRow  # noqa: E402
from draftmill.train.samples import Sample  # noqa: E402
from draftmill.train.start import initial_drafter  # noqa: E402
from draftmill.train.state import RunState, new_run  # noqa: E402
from tiny import write_tiny_target  # noqa: E402

pytestmark = pytest.mark.torch

MASK_ID = 270


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_tiny_target(tmp_path_factory.mktemp("target")))


def settings(**changed: object) -> TrainSettings:
    chosen = {"num_layers": 1, "num_taps": 2, "block_size": 8, "lr": 2e-3, "warmup_frac": 0.1, "loss": "decay"}
    return TrainSettings(input="in", output=("out",), target="t", **{**chosen, **changed})  # type: ignore[arg-type]


def documents(count: int, length: int) -> list[Sample]:
    rng = np.random.default_rng(3)
    mask = np.arange(length) >= length // 4
    return [Sample(f"s{i}", rng.integers(0, 256, length), mask) for i in range(count)]


def batch_of(
    target: Target, run: RunState, samples: Sequence[Sample], num_anchors: int, visit: int = 0, has_last: bool = False
) -> Batch:
    shape = run.drafter.shape
    reader = TapReader(target, shape.tap_ids, has_last=has_last)
    source = TargetFeatures(reader, target.device, max_tokens=1000, cache_bytes=0)
    anchors = [draw_anchors(s.loss_mask, num_anchors, seed=0, epoch=visit, sample_id=s.id, draw=0) for s in samples]
    return pack(samples, anchors, shape.block_size).with_states(source.states_of(samples), shape.mask_id)


def loss_of(target: Target, run: RunState, chosen: TrainSettings, seen: Sequence[int] = range(256)) -> LossOf:
    return LossOf(target, chosen, seen, attention_form("auto", run.drafter.shape, target.device))


def start(target: Target, chosen: TrainSettings) -> RunState:
    return new_run(initial_drafter(target, chosen, MASK_ID), chosen)


def run_steps(run: RunState, chosen: TrainSettings, micros: list[list[Batch]], target: Target) -> list[StepSums]:
    """Trains over ready batches, a list of micro-batches a step; returns every step's sums."""
    flat = [batch for step in micros for batch in step]
    numbered = [
        [PlannedRow(0, (i,), (1,), (1,)) for i, b in enumerate(flat) if any(b is m for m in step)] for step in micros
    ]
    seen: list[StepSums] = []
    made = loss_of(target, run, chosen), alone(target.device)
    schedule = Schedule(len(micros), lambda s: numbered[s], lambda row: flat[row.samples[0]], *made)
    train(run, schedule, chosen, lambda sums, epoch, lr, norm: seen.append(sums))
    return seen


@pytest.mark.parametrize("loss", ["decay", "d-pace", "uniform"])
def test_one_big_batch_equals_unequal_micro_batches(target: Target, loss: str) -> None:
    chosen, docs = settings(loss=loss, clip_norm=1e9), documents(5, 40)
    whole, cut = start(target, chosen), start(target, chosen)
    batch = batch_of(target, whole, docs, 6)
    plain = loss_of(target, whole, chosen)(whole.drafter, batch)
    means = torch.autograd.grad(plain.nats / plain.weight, list(whole.drafter.parameters()))
    sums = run_steps(whole, chosen, [[batch]], target)
    parts = [batch_of(target, cut, docs[a:b], 6) for a, b in ((0, 1), (1, 4), (4, 5))]
    cut_sums = run_steps(cut, chosen, [parts], target)
    assert cut_sums[0].loss == pytest.approx(sums[0].loss, rel=1e-6)
    assert (cut_sums[0].blocks, cut_sums[0].slots) == (sums[0].blocks, sums[0].slots) == (30, sums[0].slots)
    assert (cut_sums[0].correct_J, cut_sums[0].supervised_J) == (sums[0].correct_J, sums[0].supervised_J)
    assert sum(sums[0].supervised_J) == sums[0].slots and sums[0].supervised_J[0] == 30
    for run in (whole, cut):
        moments = run.optimizer.tensors()
        for mean, (name, _) in zip(means, run.drafter.named_parameters(), strict=True):
            seen = moments[f"exp_avg.{name}"] / (1 - chosen.beta1)
            torch.testing.assert_close(seen, mean, rtol=1e-5, atol=2e-6 * float(mean.abs().max()))


def test_a_loss_among_seen_tokens_leaves_the_rest_of_the_vocabulary_out(target: Target) -> None:
    narrow, doc = settings(loss_vocab="seen"), documents(1, 40)[0]
    run = start(target, narrow)
    batch = batch_of(target, run, [doc], 6)
    whole = loss_of(target, run, settings())(run.drafter, batch)
    everything = loss_of(target, run, narrow, range(272))(run.drafter, batch)
    torch.testing.assert_close(everything.nats, whole.nats, rtol=1e-6, atol=0)
    seen = sorted(set(doc.input_ids.tolist()))
    with torch.no_grad():
        attend = DenseAttention(batch.layout)
        embeds = target.embed(batch.block_ids_NB).flatten(0, 1)
        hidden = run.drafter(embeds, run.drafter.project(batch.features_TF), batch.layout, attend)
        logits = target.head(hidden.unflatten(0, batch.block_ids_NB.shape)[:, 1:])[batch.supervised_NJ]
    outside = [i for i in range(272) if i not in seen]
    logits[:, outside] = float("-inf")
    expected = F.cross_entropy(logits, batch.labels_NJ[batch.supervised_NJ], reduction="none")
    uniform = settings(loss_vocab="seen", loss="uniform")
    found = loss_of(target, run, uniform, seen)(run.drafter, batch)
    torch.testing.assert_close(found.nats / found.weight, expected.mean(), rtol=1e-5, atol=0)


def test_norm_gains_move_away_from_one_in_bfloat16(tmp_path: Path) -> None:
    narrow = load_target(write_tiny_target(tmp_path), dtype=torch.bfloat16)
    chosen = settings(compute_dtype="bfloat16", lr=6e-4, warmup_frac=0.0)
    run = start(narrow, chosen)
    batch = batch_of(narrow, run, documents(1, 30), 8)
    assert batch.features_TF.dtype == torch.bfloat16
    run_steps(run, chosen, [[batch]] * 10, narrow)
    gains = {name: p for name, p in run.drafter.named_parameters() if p.dim() == 1}
    assert all(p.dtype == torch.float32 for p in run.drafter.parameters())
    assert len(gains) == 6
    for name, gain in gains.items():
        assert (gain != 1).float().mean() > 0.9, f"{name} stays at 1"


def test_gains_kept_in_bfloat16_would_never_move() -> None:
    """Why masters are float32: at 1.0 a step of the learning rate is less than half of bfloat16's spacing."""
    gain = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([gain], lr=6e-4)
    for _ in range(50):
        gain.grad = torch.ones_like(gain)
        optimizer.step()
    assert gain.eq(1).all()


def test_the_frozen_target_stays_frozen(target: Target) -> None:
    chosen = settings()
    before = {name: p.clone() for name, p in target.model.named_parameters()}
    run = start(target, chosen)
    batch = batch_of(target, run, documents(1, 30), 8)
    assert batch.features_TF.grad_fn is None and not batch.features_TF.requires_grad
    run_steps(run, chosen, [[batch]] * 2, target)
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in target.model.named_parameters())
    kept = {name.partition(".")[2] for name in run.optimizer.tensors()}
    assert kept == {name for name, _ in run.drafter.named_parameters()}


def test_a_step_that_is_not_finite_moves_nothing_and_too_many_in_a_row_end_the_run(target: Target) -> None:
    chosen = settings(max_bad_steps=2)
    run = start(target, chosen)
    good = batch_of(target, run, documents(1, 30), 8)
    bad = Batch(good.features_TF * float("nan"), good.block_ids_NB, good.layout, good.labels_NJ, good.supervised_NJ)
    run_steps(run, chosen, [[good]], target)
    before = [p.clone() for p in run.drafter.parameters()]
    run.position.step = 0
    run_steps(run, chosen, [[bad], [bad]], target)
    assert all(torch.equal(p, q) for p, q in zip(run.drafter.parameters(), before, strict=True))
    assert (run.position.num_bad, run.position.bad_in_a_row, run.position.num_updates) == (2, 2, 1)
    run.position.step = 0
    run_steps(run, chosen, [[good]], target)
    assert run.position.bad_in_a_row == 0
    run.position.step = 0
    with pytest.raises(DivergedError, match="3 steps in a row"):
        run_steps(run, chosen, [[bad]] * 5, target)


@pytest.mark.parametrize(
    ("weight", "num_updates", "message"),
    [
        (float("nan"), 1, "step 4: the norm of the weights is nan"),
        (1e38, 1, "step 4: the norm of the weights is inf"),
        (1.0, 0, "not finite in every step: nothing was learnt"),
    ],
)
def test_weights_that_are_no_drafters_are_not_kept(
    target: Target, weight: float, num_updates: int, message: str
) -> None:
    run = start(target, settings())
    run.position.step, run.position.num_updates = 4, 1
    refuse_unsound(run, 4)
    run.position.num_updates = num_updates
    torch.nn.init.constant_(run.drafter.fc.weight, weight)
    with pytest.raises(DivergedError, match=message + ".*the same recipe would end here again"):
        refuse_unsound(run, 4)


def test_a_drafter_trained_to_the_end_on_one_sample_drafts_it_in_full_blocks(target: Target) -> None:
    chosen = settings(lr=5e-3, num_layers=1)
    doc = documents(1, 48)[0]
    run = start(target, chosen)
    batches = [[batch_of(target, run, [doc], 12, visit)] for visit in range(150)]
    sums = run_steps(run, chosen, batches, target)
    assert sums[0].emitted / sums[0].blocks < 1.5
    ids, shape = torch.from_numpy(doc.input_ids), run.drafter.shape
    reader, cache = TapReader(target, shape.tap_ids), DraftCache()
    at, past, emitted = 12, DynamicCache(config=target.model.config), []
    while at + shape.block_size <= len(ids):
        with reader.capturing() as captured, torch.no_grad():
            target.model(ids[None, cache.length : at], None, None, past, use_cache=True)
        block = torch.tensor([int(ids[at]), *[MASK_ID] * (shape.block_size - 1)])
        hidden = run.drafter.draft(cache, captured.features()[0], cache.length, target.embed(block))
        draft = target.head(hidden[1:]).argmax(-1).tolist()
        emitted.append(1 + num_accepted(draft, ids[at + 1 :].tolist()))
        at += emitted[-1]
    assert emitted == [shape.block_size] * len(emitted) and len(emitted) >= 4


def test_a_micro_batch_of_which_nothing_is_learnt_weighs_nothing(target: Target) -> None:
    chosen = settings()
    together, whole, idle = start(target, chosen), start(target, chosen), start(target, chosen)
    good, empty = (batch_of(target, together, [doc], 6) for doc in documents(2, 40))
    empty = replace(empty, supervised_NJ=torch.zeros_like(empty.supervised_NJ))
    sums = run_steps(together, chosen, [[good, empty]], target), run_steps(whole, chosen, [[good]], target)
    assert sums[0][0].loss == sums[1][0].loss
    assert all(
        torch.equal(p, q) for p, q in zip(together.drafter.parameters(), whole.drafter.parameters(), strict=True)
    )
    before = [p.clone() for p in idle.drafter.parameters()]
    run_steps(idle, chosen, [[empty]], target)
    assert all(torch.equal(p, q) for p, q in zip(idle.drafter.parameters(), before, strict=True))
    assert (idle.position.num_bad, idle.position.step) == (0, 1)


def test_the_weights_of_all_ranks_are_compared_after_every_epoch(target: Target) -> None:
    chosen, compared = settings(), []
    run = start(target, chosen)
    batch = batch_of(target, run, documents(1, 30), 4)
    rows = [[PlannedRow(epoch, (0,), (1,), (1,)) for epoch in epochs] for epochs in ((0, 0), (0, 1), (1, 1), (2, 2))]

    class Watching(Ranks):
        def check_equal(self, parameters: Sequence[torch.nn.Parameter]) -> None:
            assert [id(p) for p in parameters] == [id(p) for p in run.drafter.parameters()]
            compared.append(run.position.step)

    ranks = Watching(Layout(1, 1, is_split=False), 0, (target.device,), None)
    schedule = Schedule(4, lambda step: rows[step], lambda row: batch, loss_of(target, run, chosen), ranks)
    train(run, schedule, chosen, lambda *_: None)
    assert compared == [1, 3, 4]


def test_a_step_lasts_from_the_end_of_the_one_before_by_the_clock_on_the_wall(target: Target) -> None:
    """Three seconds make a batch, two cost it, and five follow each step."""
    chosen, now, seen = settings(), [0.0], []
    run = start(target, chosen)
    batch, costs = batch_of(target, run, documents(1, 30), 4), loss_of(target, run, chosen)

    def after(seconds: float, value: Any) -> Any:
        now[0] += seconds
        return value

    schedule = Schedule(
        num_steps=3,
        micros_of=lambda step: [PlannedRow(0, (0,), (1,), (1,))],
        batch_at=lambda row: after(3.0, batch),
        loss_of=lambda drafter, batch: after(2.0, costs(drafter, batch)),
        ranks=alone(target.device),
        clock=lambda: now[0],
    )
    train(run, schedule, chosen, lambda sums, *_: seen.append(after(5.0, sums)))
    assert [sums.wall_s for sums in seen] == [5.0, 10.0, 10.0]
    assert [sums.frac("drafter") for sums in seen] == [0.4, 0.2, 0.2]
    records = [sums.record(step=1, epoch=0, lr=0.1, grad_norm=1.0) for sums in seen]
    assert [record["tokens_per_s"] for record in records] == [6.0, 3.0, 3.0]
