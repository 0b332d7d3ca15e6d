"""The loss is the one of the papers, its chunks change nothing, and what is not supervised teaches nothing."""

import math

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from draftmill.model.loss import LossRule, block_loss, head_nats, slot_weights  # noqa: E402

pytestmark = pytest.mark.torch

BLOCKS, SLOTS, HIDDEN, VOCAB = 9, 3, 8, 31
RULES = {kind: LossRule(kind, gamma=2.0, alpha=0.5) for kind in ("decay", "d-pace", "uniform")}


def case(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, labels, supervised leading runs of every length (none among them), and a head."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=generator, requires_grad=True)
    labels = torch.randint(0, VOCAB, (BLOCKS, SLOTS), generator=generator)
    supervised = torch.arange(SLOTS) < torch.arange(BLOCKS)[:, None] % (SLOTS + 1)
    return hidden, labels, supervised, torch.randn(VOCAB, HIDDEN, generator=generator)


def plain(hidden, labels, supervised, head, rule: LossRule):
    """The same loss through full logits and autograd, slot by slot."""
    log_probs = (hidden @ head.T).log_softmax(-1)
    nats, divisor = torch.zeros(()), 0.0
    for n in range(len(labels)):
        run = [j for j in range(labels.shape[1]) if supervised[n, j]]
        q = [math.exp(log_probs[n, j, labels[n, j]].item()) for j in run]
        reach = [math.prod(0.5 * x + 0.5 for x in q[: m + 1]) for m in range(len(run))]
        for j in run:
            weight = {"uniform": 1.0, "decay": math.exp(-j / rule.gamma), "d-pace": sum(reach[j:])}[rule.kind]
            nats = nats - weight * log_probs[n, j, labels[n, j]]
            divisor += 1.0 if rule.kind == "d-pace" else weight
    return nats, divisor


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("slots_per_chunk", [1, 4, 1000])
def test_chunks_give_the_value_and_the_gradient_of_full_logits(rule: LossRule, slots_per_chunk: int) -> None:
    hidden, labels, supervised, head = case()
    ours = block_loss(hidden, labels, supervised, head, rule, slots_per_chunk * VOCAB)
    (gradient,) = torch.autograd.grad(ours.nats / ours.weight, hidden)
    nats, divisor = plain(hidden, labels, supervised, head, rule)
    (expected,) = torch.autograd.grad(nats / divisor, hidden)
    assert float(ours.weight) == pytest.approx(divisor, rel=1e-6)
    torch.testing.assert_close(ours.nats, nats, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_correct_slots_are_those_whose_likeliest_token_is_the_label() -> None:
    hidden, labels, supervised, head = case()
    likeliest = (hidden @ head.T).argmax(-1)
    labels[::2] = likeliest[::2]
    found = block_loss(hidden, labels, supervised, head, RULES["decay"]).correct_NJ
    assert torch.equal(found, (labels == likeliest) & supervised)
    assert found.any() and not found.all()


def test_uniform_logits_cost_log_vocabulary_in_every_weighting() -> None:
    hidden, labels, supervised, head = case()
    for rule in RULES.values():
        loss = block_loss(torch.zeros_like(hidden), labels, supervised, head, rule)
        weights = slot_weights(torch.full(labels.shape, 1 / VOCAB) * supervised, supervised, rule)
        assert float(loss.nats) == pytest.approx(float(weights.sum()) * math.log(VOCAB), rel=1e-5)


def test_decay_falls_from_one_and_stops_with_the_supervised_run() -> None:
    supervised = torch.tensor([[True, True, False]])
    weights = slot_weights(torch.zeros(1, 3), supervised, RULES["decay"])
    torch.testing.assert_close(weights, torch.tensor([[1.0, math.exp(-0.5), 0.0]]))


def test_d_pace_weights_are_the_sums_of_reach() -> None:
    probs = torch.tensor([[0.2, 0.6, 0.9]])
    s1, s2, s3 = 0.6, 0.8, 0.95
    expected = torch.tensor([[s1 + s1 * s2 + s1 * s2 * s3, s1 * s2 + s1 * s2 * s3, s1 * s2 * s3]])
    torch.testing.assert_close(slot_weights(probs, torch.ones(1, 3, dtype=torch.bool), RULES["d-pace"]), expected)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rows_without_a_supervised_slot_cost_nothing_and_give_finite_gradients(rule: LossRule) -> None:
    hidden, labels, supervised, head = case()
    loss = block_loss(hidden, labels, torch.zeros_like(supervised), head, rule)
    loss.nats.backward()
    assert float(loss.nats.detach()) == 0 and float(loss.weight) == 0
    assert hidden.grad is not None and hidden.grad.eq(0).all()


def test_one_enormous_logit_stays_finite() -> None:
    hidden, labels, supervised, head = case()
    loss = block_loss(hidden * 1e4, labels, supervised, head, RULES["decay"])
    (gradient,) = torch.autograd.grad(loss.nats, hidden)
    assert loss.nats.isfinite() and gradient.isfinite().all()


def test_full_logits_never_exist() -> None:
    hidden, labels, supervised, head = case()
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.shape[-1:] == (VOCAB,) and made.shape != head.T.shape:
                sizes.append(made.numel())
            return made

    with Watch():
        block_loss(hidden, labels, supervised, head, RULES["decay"], 2 * VOCAB).nats.backward()
    assert sizes and max(sizes) <= 2 * VOCAB


def test_the_head_in_bfloat16_stays_close_to_float32() -> None:
    hidden, labels, supervised, head = case()
    wide = block_loss(hidden, labels, supervised, head, RULES["decay"])
    narrow = block_loss(hidden.bfloat16(), labels, supervised, head.bfloat16(), RULES["decay"])
    assert narrow.nats.dtype == torch.float32
    assert float(narrow.nats.detach()) == pytest.approx(float(wide.nats.detach()), rel=2e-2)


def test_cross_entropy_is_torchs_own() -> None:
    hidden, labels, _, head = case()
    nats, _ = head_nats(hidden.flatten(0, 1), labels.flatten(), head, 5 * VOCAB)
    expected = F.cross_entropy(hidden.flatten(0, 1) @ head.T, labels.flatten(), reduction="none")
    torch.testing.assert_close(nats, expected, rtol=1e-6, atol=1e-6)
