"""Documents packed into one training row teach what they teach alone: the same loss, the same gradient, every loss."""

from collections.abc import Sequence

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from draftmill.extract.taps import TapReader  # noqa: E402
from draftmill.extract.target import Target, freeze  # noqa: E402
from draftmill.model.drafter import Drafter  # noqa: E402
from draftmill.model.forms import attention_form  # noqa: E402
from draftmill.model.loss import BlockLoss  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.train.batches import Batch, pack  # noqa: E402
from draftmill.train.features import TargetFeatures  # noqa: E402
from draftmill.train.loop import LossOf  # noqa: E402
from draftmill.train.samples import Sample  # noqa: E402
from draftmill.train.start import drafter_shape  # noqa: E402
from tiny_drafter import random_drafter  # noqa: E402
from tiny_families import VOCAB, tiny_model  # noqa: E402

pytestmark = pytest.mark.torch

MASK_ID, BLOCK = 2, 4
LENGTHS, ANCHORS = (21, 9, 30), ([3, 7, 18], [1, 6], [0, 11, 12, 27])
LOSSES: dict[str, dict[str, object]] = {
    "decay": {"loss": "decay", "gamma": 4.0},
    "d-pace, sliding": {"loss": "d-pace", "num_sliding_layers": 1, "sliding_window": 5},
    "kl and tv": {"loss": "uniform", "hard_weight": 0.2, "kl_weight": 0.5, "tv_weight": 0.9, "labels": "target"},
}


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def target(request: pytest.FixtureRequest) -> Target:
    return freeze(tiny_model(request.param))


def settings(chosen: dict[str, object]) -> TrainSettings:
    given = {"num_layers": 2, "num_taps": 2, "block_size": BLOCK, **chosen}
    return TrainSettings(input="in", output=("out",), target="t", **given)  # type: ignore[arg-type]


def documents() -> list[Sample]:
    rng = np.random.default_rng(5)
    # Every tenth token is unsupervised: runs end inside blocks, and the documents' divisors differ.
    return [Sample(f"d{n}", rng.integers(3, VOCAB, n), np.arange(n) % 10 != 9) for n in LENGTHS]


def batch_of(target: Target, drafter: Drafter, docs: Sequence[Sample], anchors: Sequence[Sequence[int]]) -> Batch:
    reader = TapReader(target, drafter.shape.tap_ids, has_last=True)
    source = TargetFeatures(reader, target.device, max_tokens=100, cache_bytes=0)
    return pack(docs, [np.array(some) for some in anchors], BLOCK).with_states(source.states_of(docs), MASK_ID)


@pytest.mark.parametrize("chosen", LOSSES.values(), ids=LOSSES)
def test_loss_and_gradient_of_a_packed_row_are_the_sums_of_its_documents(
    target: Target, chosen: dict[str, object]
) -> None:
    given = settings(chosen)
    drafter = random_drafter(drafter_shape(target, given, MASK_ID))
    loss_of = LossOf(target, given, (), attention_form("auto", drafter.shape, target.device))

    def learnt(docs: Sequence[Sample], anchors: Sequence[Sequence[int]]) -> BlockLoss:
        loss = loss_of(drafter, batch_of(target, drafter, docs, anchors))
        loss.nats.backward()
        return loss

    alone = [learnt([doc], [some]) for doc, some in zip(documents(), ANCHORS, strict=True)]
    summed = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    packed = learnt(documents(), ANCHORS)
    torch.testing.assert_close(packed.nats, torch.stack([one.nats for one in alone]).sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed.weight, torch.stack([one.weight for one in alone]).sum(), rtol=1e-6, atol=0)
    assert torch.equal(packed.correct_NJ, torch.cat([one.correct_NJ for one in alone]))
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None
        size = float(summed[name].abs().max())
        torch.testing.assert_close(parameter.grad, summed[name], rtol=1e-4, atol=1e-5 * size, msg=name)


def test_the_targets_distribution_is_learnt_from_its_own_logits(target: Target) -> None:
    """KL through tiles and the target's own norm module (Qwen3.5's multiplies by 1 + weight) is KL from its logits."""
    given = settings({"loss": "uniform", "hard_weight": 0.0, "kl_weight": 1.0})
    drafter = random_drafter(drafter_shape(target, given, MASK_ID))
    doc, anchors = documents()[0], ANCHORS[0]
    batch = batch_of(target, drafter, [doc], [anchors])
    attention = attention_form("dense", drafter.shape, target.device)
    found = LossOf(target, given, (), attention)(drafter, batch)
    with torch.no_grad():
        own = target.model(input_ids=torch.from_numpy(doc.input_ids)[None]).logits[0].log_softmax(dim=-1)
        embeds = target.embed(batch.block_ids_NB).flatten(0, 1)
        context = drafter.project(batch.features_TF)
        hidden = drafter(embeds, context, batch.layout, attention.over(batch.layout)).unflatten(0, (-1, BLOCK))
        drafted = target.head(hidden).log_softmax(dim=-1)
    slots = [(n, i) for n, i in (batch.supervised_NJ.nonzero() + torch.tensor([0, 1])).tolist()]
    said = [own[anchors[n] + i - 1] for n, i in slots]
    expected = sum(float((p.exp() * (p - drafted[n, i])).sum()) for p, (n, i) in zip(said, slots, strict=True))
    assert len(slots) > len(anchors)
    assert float(found.nats.detach()) == pytest.approx(expected, rel=1e-5)
