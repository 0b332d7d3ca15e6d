"""One training step computed by another implementation of DFlash (fixtures/oracle): same losses, same gradients."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from draftmill.model.attention import DenseAttention  # noqa: E402
from draftmill.model.drafter import Drafter  # noqa: E402
from draftmill.model.grouped import GroupedAttention  # noqa: E402
from draftmill.model.loss import BlockLoss, LossRule, Truth, block_loss  # noqa: E402
from draftmill.model.mask import one_document  # noqa: E402
from draftmill.model.shape import DrafterShape  # noqa: E402
from draftmill.model.vocabulary import Objective  # noqa: E402

pytestmark = pytest.mark.torch

ORACLE = Path(__file__).parents[1] / "fixtures" / "oracle"
BLOCK, MASK_ID = 4, 150
HARD, KL = Objective(hard=1.0, kl=0.0, tv=0.0), Objective(hard=0.0, kl=1.0, tv=0.0)
DECAY, D_PACE, DECAY_KL = (
    LossRule(kind, gamma=4.0, alpha=0.5, objective=objective)
    for kind, objective in (("decay", HARD), ("d-pace", HARD), ("decay", KL))
)


@pytest.fixture(scope="module")
def step() -> dict[str, torch.Tensor]:
    return load_file(ORACLE / "ref_step.safetensors")


@pytest.fixture(scope="module")
def target() -> dict[str, torch.Tensor]:
    return load_file(ORACLE / "target" / "model.safetensors")


def their_drafter() -> Drafter:
    shape = DrafterShape(
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_positions=512,
        vocab_size=160,
        block_size=BLOCK,
        tap_ids=(0, 2, 4),
        mask_id=MASK_ID,
        num_target_layers=6,
        layer_types=("full_attention", "full_attention"),
    )
    drafter = Drafter(shape)
    drafter.load_state_dict(load_file(ORACLE / "drafter" / "model.safetensors"))
    return drafter


def our_step(drafter: Drafter, step, target, rule: LossRule, *, argmax_labels: bool, grouped: bool = True) -> BlockLoss:
    ids, anchors = step["ids"][0], step["anchors"]
    layout = one_document(anchors, len(ids), BLOCK)
    block_ids = torch.full((len(anchors), BLOCK), MASK_ID)
    block_ids[:, 0] = ids[anchors]
    embeds = target["model.embed_tokens.weight"][block_ids].flatten(0, 1)
    attend = GroupedAttention(layout, [None]) if grouped else DenseAttention(layout)
    hidden = drafter(embeds, drafter.project(step["aux"][0]), layout, attend).unflatten(0, block_ids.shape)
    # Theirs is what the target itself would say after a + i - 1; `None` asks for that.
    labels = None if argmax_labels else ids[layout.slots_NB[:, 1:]]
    last = F.rms_norm(step["last"][0], (64,), target["model.norm.weight"], 1e-6)
    supervised = torch.ones(len(anchors), BLOCK - 1, dtype=torch.bool)
    truth = Truth(supervised, labels, last[layout.slots_NB[:, 1:] - 1].flatten(0, 1))
    return block_loss(hidden[:, 1:], truth, target["lm_head.weight"], rule, tile_logits=900)


def num_slots(step) -> int:
    return len(step["anchors"]) * (BLOCK - 1)


@pytest.mark.parametrize("grouped", [True, False])
def test_the_loss_and_every_gradient_are_the_oracles(step, target, grouped: bool) -> None:
    drafter = their_drafter()
    loss = our_step(drafter, step, target, DECAY, argmax_labels=True, grouped=grouped).nats / num_slots(step)
    loss.backward()
    said = json.loads((ORACLE / "ref_step.json").read_text())["ce_exp"]
    assert float(loss.detach()) == pytest.approx(said["loss"], rel=1e-5)
    grads = dict(drafter.named_parameters())
    assert {f"grad.{name}" for name in grads} == {name for name in step if name.startswith("grad.")}
    for name, parameter in grads.items():
        expected = step[f"grad.{name}"]
        error = (parameter.grad - expected).norm() / expected.norm()
        assert error < 1e-5, f"{name} is off by {error:.1e}"
    norm = torch.stack([p.grad.norm() for p in drafter.parameters()]).norm()
    assert float(norm) == pytest.approx(said["grad_norm"], rel=1e-5)


def test_the_d_pace_loss_and_gradient_norm_are_the_oracles(step, target) -> None:
    drafter = their_drafter()
    ours = our_step(drafter, step, target, D_PACE, argmax_labels=True)
    assert float(ours.weight) == num_slots(step)
    (ours.nats / ours.weight).backward()
    said = json.loads((ORACLE / "ref_step.json").read_text())["ce_dpace"]
    assert float(ours.nats.detach() / ours.weight) == pytest.approx(said["loss"], rel=1e-5)
    assert float(ours.nats.detach()) / len(step["anchors"]) == pytest.approx(7.3554, abs=5e-5)
    norm = torch.stack([p.grad.norm() for p in drafter.parameters()]).norm()
    assert float(norm) == pytest.approx(said["grad_norm"], rel=1e-5)


def test_the_loss_against_the_targets_distribution_is_the_oracles(step, target) -> None:
    drafter = their_drafter()
    ours = our_step(drafter, step, target, DECAY_KL, argmax_labels=True)
    (ours.nats / num_slots(step)).backward()
    said = json.loads((ORACLE / "ref_step.json").read_text())["kl_exp"]
    assert float(ours.nats.detach()) / num_slots(step) == pytest.approx(said["loss"], rel=2e-5)
    norm = torch.stack([p.grad.norm() for p in drafter.parameters()]).norm()
    assert float(norm) == pytest.approx(said["grad_norm"], rel=2e-5)


@pytest.mark.parametrize(
    ("argmax_labels", "per_slot", "per_weight"), [(False, 4.0542560, 5.0989845), (True, 4.1950173, 5.2760210)]
)
def test_text_and_argmax_labels_give_the_recorded_figures(
    step, target, argmax_labels: bool, per_slot: float, per_weight: float
) -> None:
    ours = our_step(their_drafter(), step, target, DECAY, argmax_labels=argmax_labels)
    assert float(ours.nats.detach()) / num_slots(step) == pytest.approx(per_slot, rel=1e-5)
    assert float(ours.nats.detach() / ours.weight) == pytest.approx(per_weight, rel=1e-5)
