"""Every parameter is moved by the rule that the table of `train/optimizer.py` names, and goes on bit for bit."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from pydantic import ValidationError  # noqa: E402

from draftmill.model.drafter import Drafter  # noqa: E402
from draftmill.model.shape import DrafterShape  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.train.optimizer import Optimizer  # noqa: E402
from draftmill.train.state import RunState, new_run  # noqa: E402

pytestmark = pytest.mark.torch

SHAPE = DrafterShape(
    **{"hidden_size": 8, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "intermediate_size": 12},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_positions": 64, "vocab_size": 10, "block_size": 4},
    **{"tap_ids": (0, 1), "mask_id": 9, "num_target_layers": 4, "layer_types": ("full_attention",) * 2},
)
LR = 1e-2


def settings(**changed: object) -> TrainSettings:
    chosen = {"lr": LR, **changed}
    return TrainSettings(input="in", output=("out",), target="t", **chosen)  # type: ignore[arg-type]


def started(chosen: TrainSettings, shape: DrafterShape = SHAPE) -> RunState:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return new_run(Drafter(shape), chosen)


def move(run: RunState, updates: range) -> None:
    """Moves the weights by gradients that depend on the number of the update alone."""
    for update in updates:
        generator = torch.Generator().manual_seed(update)
        for parameter in run.drafter.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        run.move(LR)
        run.optimizer.clear_gradients()


def kept_of(run: RunState, what: str) -> set[str]:
    """The parameters of which `what` is kept between steps: only the rule that moves one keeps anything of it."""
    return {name.partition(".")[2] for name in run.optimizer.tensors() if name.partition(".")[0] == what}


def test_muon_moves_the_matrices_of_the_layers_and_nothing_else() -> None:
    run, plain = started(settings(optimizer="muon")), started(settings())
    move(run, range(1))
    move(plain, range(1))
    by_muon, by_adamw = kept_of(run, "momentum_buffer"), kept_of(run, "exp_avg")
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {name.split(".")[-2] for name in by_muon} == set(kinds) and len(by_muon) == 2 * len(kinds)
    every = {name for name, _ in run.drafter.named_parameters()}
    assert by_adamw == kept_of(run, "exp_avg_sq") == every - by_muon
    assert {"fc.weight", "norm.weight", "layers.0.self_attn.q_norm.weight"} <= by_adamw
    assert kept_of(plain, "exp_avg") == every and not kept_of(plain, "momentum_buffer")


def test_an_update_of_muon_is_orthogonal_and_as_long_as_one_of_adamw() -> None:
    chosen = settings(optimizer="muon")
    run = started(chosen, replace(SHAPE, hidden_size=32, intermediate_size=512))
    weight = dict(run.drafter.named_parameters())["layers.0.mlp.down_proj.weight"]
    before = weight.detach().clone()
    move(run, range(1))
    moved = (before - weight.detach()) / LR
    # Newton-Schulz in bfloat16 leaves singular values between 0.7 and 1.2 or so of what they should be.
    lengths = torch.linalg.svdvals(moved) / (0.2 * max(weight.shape) ** 0.5)
    assert lengths.min() > 0.6 and lengths.max() < 1.3
    # AdamW's updates have entries of about 0.2 to 0.4 times lr (arXiv 2502.16982, section 2.2).
    assert 0.1 < moved.square().mean().sqrt() < 0.3


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_restored_from_its_files_goes_on_bit_for_bit(optimizer: str) -> None:
    chosen = settings(optimizer=optimizer, weight_decay=0.1)
    whole, cut = started(chosen), started(chosen)
    move(whole, range(7))
    move(cut, range(3))
    again = started(chosen)
    again.restore(cut.files())
    move(again, range(3, 7))
    assert again.files() == whole.files()
    assert again.position.num_updates == 7


def test_a_run_restored_before_its_first_update_starts_as_new() -> None:
    chosen = settings(optimizer="muon")
    first, again = started(chosen), started(chosen)
    again.restore(first.files())
    move(first, range(2))
    move(again, range(2))
    assert again.files() == first.files()


def test_muon_can_have_a_learning_rate_of_its_own() -> None:
    one, other = started(settings(optimizer="muon")), started(settings(optimizer="muon", muon_lr=3 * LR))
    start = {name: p.detach().clone() for name, p in one.drafter.named_parameters()}
    move(one, range(1))
    move(other, range(1))
    by_muon = kept_of(one, "momentum_buffer")
    for (name, mine), theirs in zip(one.drafter.named_parameters(), other.drafter.parameters(), strict=True):
        times = 3.0 if name in by_muon else 1.0
        torch.testing.assert_close(theirs - start[name], times * (mine - start[name]), rtol=1e-3, atol=1e-6)
    with pytest.raises(ValidationError, match=r"--muon-lr 0\.03 goes with --optimizer muon"):
        settings(muon_lr=3 * LR)


def test_masters_of_another_dtype_are_not_taken() -> None:
    with pytest.raises(AssertionError, match="float32"):
        Optimizer(Drafter(SHAPE).bfloat16(), settings())
