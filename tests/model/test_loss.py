"""The loss is the one of the papers, its tiles change nothing, and what is not supervised teaches nothing."""

import math

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from draftmill.model.loss import LossRule, Truth, block_loss, slot_weights  # noqa: E402
from draftmill.model.vocabulary import ROWS_PER_PIECE, ROWS_PER_TILE, Objective  # noqa: E402

pytestmark = pytest.mark.torch

BLOCKS, SLOTS, HIDDEN, VOCAB = 9, 3, 8, 31
HARD = Objective(hard=1.0, kl=0.0, tv=0.0)
OBJECTIVES = {
    "hard": HARD,
    "kl": Objective(hard=0.0, kl=1.0, tv=0.0),
    "tv": Objective(hard=0.0, kl=0.0, tv=1.0),
    "all": Objective(hard=0.3, kl=0.5, tv=0.9),
}
KINDS = ("decay", "d-pace", "uniform")


def rule(kind: str, objective: Objective = HARD) -> LossRule:
    return LossRule(kind, gamma=2.0, alpha=0.5, objective=objective)  # type: ignore[arg-type]


Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def case(seed: int = 0) -> Case:
    """Hidden states of drafter and target, labels, supervised leading runs of every length (none too), and a head."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=generator, requires_grad=True)
    labels = torch.randint(0, VOCAB, (BLOCKS, SLOTS), generator=generator)
    supervised = torch.arange(SLOTS) < torch.arange(BLOCKS)[:, None] % (SLOTS + 1)
    head = torch.randn(VOCAB, HIDDEN, generator=generator)
    return hidden, labels, supervised, head, torch.randn(BLOCKS, SLOTS, HIDDEN, generator=generator)


def ours(given: Case, wanted: LossRule, *, own_labels: bool = False, tile_logits: int | None = None):
    hidden, labels, supervised, head, target = given
    truth = Truth(supervised, None if own_labels else labels, target[supervised])
    return block_loss(hidden, truth, head, wanted, tile_logits)


def plain(given: Case, wanted: LossRule, *, own_labels: bool):
    """The same loss through full logits and autograd, slot by slot."""
    hidden, labels, supervised, head, target = given
    log_q, log_p = (hidden @ head.T).log_softmax(-1), (target @ head.T).log_softmax(-1)
    labels = log_p.argmax(-1) if own_labels else labels
    part = wanted.objective
    nats, divisor = torch.zeros(()), 0.0
    for n in range(len(labels)):
        run = [j for j in range(labels.shape[1]) if supervised[n, j]]
        q = [math.exp(log_q[n, j, labels[n, j]].item()) for j in run]
        reach = [math.prod(0.5 * x + 0.5 for x in q[: m + 1]) for m in range(len(run))]
        for j in run:
            weight = {"uniform": 1.0, "decay": math.exp(-j / wanted.gamma), "d-pace": sum(reach[j:])}[wanted.kind]
            cost = -part.hard * log_q[n, j, labels[n, j]]
            cost = cost + part.kl * F.kl_div(log_q[n, j], log_p[n, j], reduction="sum", log_target=True)
            cost = cost + part.tv * (log_q[n, j].exp() - log_p[n, j].exp()).abs().sum() / 2
            nats = nats + weight * cost
            divisor += 1.0 if wanted.kind == "d-pace" else weight
    return nats, divisor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("own_labels", [False, True])
@pytest.mark.parametrize("tile_logits", [1, 4 * VOCAB, 200, 100_000, None])
def test_tiles_give_the_value_and_the_gradient_of_full_logits(
    kind: str, objective: Objective, own_labels: bool, tile_logits: int | None
) -> None:
    given, wanted = case(), rule(kind, objective)
    found = ours(given, wanted, own_labels=own_labels, tile_logits=tile_logits)
    (gradient,) = torch.autograd.grad(found.nats / found.weight, given[0])
    nats, divisor = plain(given, wanted, own_labels=own_labels)
    (expected,) = torch.autograd.grad(nats / divisor, given[0])
    assert float(found.weight) == pytest.approx(divisor, rel=1e-6)
    torch.testing.assert_close(found.nats, nats, rtol=2e-6, atol=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tile_logits", [5, 10_000])
def test_correct_slots_are_those_whose_likeliest_token_is_the_label(tile_logits: int) -> None:
    hidden, labels, supervised, head, target = case()
    likeliest = (hidden @ head.T).argmax(-1)
    labels[::2] = likeliest[::2]
    found = ours((hidden, labels, supervised, head, target), rule("decay"), tile_logits=tile_logits).correct_NJ
    assert torch.equal(found, (labels == likeliest) & supervised)
    assert found.any() and not found.all()


def test_of_equal_logits_the_lowest_token_is_the_likeliest_as_in_decoding() -> None:
    hidden, _, _, head, target = case()
    head = torch.cat([head, head])  # every logit occurs twice
    likeliest = (hidden @ head.T).argmax(-1)
    supervised = torch.ones(BLOCKS, SLOTS, dtype=torch.bool)
    for shift, is_correct in ((0, True), (VOCAB, False)):
        found = ours((hidden, likeliest + shift, supervised, head, target), rule("decay"), tile_logits=7)
        assert bool(found.correct_NJ.all()) == is_correct


@pytest.mark.parametrize("tile_logits", [None, ROWS_PER_TILE * 2 * ROWS_PER_PIECE])
def test_the_likeliest_row_is_found_piece_by_piece_as_argmax_finds_it(tile_logits: int | None) -> None:
    hidden, _, _, _, target = case()
    half = torch.randn(2 * ROWS_PER_PIECE, HIDDEN, generator=torch.Generator().manual_seed(7))
    head = torch.cat([half, half])  # four pieces, and every logit occurs in two of them
    likeliest = (hidden @ head.T).argmax(-1)
    assert likeliest.unique().numel() > BLOCKS and (likeliest >= ROWS_PER_PIECE).any()
    supervised = torch.ones(BLOCKS, SLOTS, dtype=torch.bool)
    for shift, is_correct in ((0, True), (1, False), (len(half), False)):
        given = (hidden, likeliest + shift, supervised, head, target)
        assert ours(given, rule("decay"), tile_logits=tile_logits).correct_NJ.eq(is_correct).all()


def test_uniform_logits_cost_log_vocabulary_in_every_weighting() -> None:
    hidden, labels, supervised, head, target = case()
    for kind in KINDS:
        loss = ours((torch.zeros_like(hidden), labels, supervised, head, target), rule(kind))
        weights = slot_weights(torch.full(labels.shape, 1 / VOCAB) * supervised, supervised, rule(kind))
        assert float(loss.nats) == pytest.approx(float(weights.sum()) * math.log(VOCAB), rel=1e-5)


def test_a_drafter_that_says_what_the_target_says_costs_no_divergence() -> None:
    hidden, labels, supervised, head, _ = case()
    for name in ("kl", "tv"):
        loss = ours((hidden, labels, supervised, head, hidden.detach()), rule("uniform", OBJECTIVES[name]))
        (gradient,) = torch.autograd.grad(loss.nats, hidden)
        assert float(loss.nats.detach()) == pytest.approx(0, abs=1e-5)
        assert gradient.abs().max() < 1e-5


def test_decay_falls_from_one_and_stops_with_the_supervised_run() -> None:
    supervised = torch.tensor([[True, True, False]])
    weights = slot_weights(torch.zeros(1, 3), supervised, rule("decay"))
    torch.testing.assert_close(weights, torch.tensor([[1.0, math.exp(-0.5), 0.0]]))


def test_d_pace_weights_are_the_sums_of_reach() -> None:
    probs = torch.tensor([[0.2, 0.6, 0.9]])
    s1, s2, s3 = 0.6, 0.8, 0.95
    expected = torch.tensor([[s1 + s1 * s2 + s1 * s2 * s3, s1 * s2 + s1 * s2 * s3, s1 * s2 * s3]])
    torch.testing.assert_close(slot_weights(probs, torch.ones(1, 3, dtype=torch.bool), rule("d-pace")), expected)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_rows_without_a_supervised_slot_cost_nothing_and_give_finite_gradients(objective: Objective) -> None:
    hidden, labels, supervised, head, target = case()
    for kind in KINDS:
        loss = ours((hidden, labels, torch.zeros_like(supervised), head, target), rule(kind, objective))
        loss.nats.backward()
        assert float(loss.nats.detach()) == 0 and float(loss.weight) == 0
        assert hidden.grad is not None and hidden.grad.eq(0).all()


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_enormous_logits_stay_finite(objective: Objective) -> None:
    hidden, labels, supervised, head, target = case()
    loss = ours((hidden * 1e4, labels, supervised, head, target * 1e4), rule("decay", objective), tile_logits=50)
    (gradient,) = torch.autograd.grad(loss.nats, hidden)
    assert loss.nats.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize("name", ["hard", "kl"])
def test_no_more_logits_than_a_tile_exist_at_a_time(name: str) -> None:
    given, tile_logits = case(), 24
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default and made.shape[-1] != HIDDEN:
                sizes.append(made.numel())
            return made

    with Watch():
        ours(given, rule("decay", OBJECTIVES[name]), tile_logits=tile_logits).nats.backward()
    assert len(sizes) >= VOCAB / 2 and max(sizes) <= tile_logits


def test_the_head_in_bfloat16_stays_close_to_float32() -> None:
    hidden, labels, supervised, head, target = case()
    for objective in OBJECTIVES.values():
        wide = ours((hidden, labels, supervised, head, target), rule("decay", objective), tile_logits=64)
        low = (hidden.bfloat16(), labels, supervised, head.bfloat16(), target.bfloat16())
        narrow = ours(low, rule("decay", objective), tile_logits=64)
        assert narrow.nats.dtype == torch.float32
        assert float(narrow.nats.detach()) == pytest.approx(float(wide.nats.detach()), rel=2e-2)
