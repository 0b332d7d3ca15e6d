"""A run starts from the target's shape and the seed, or from copies of the target's own layers."""

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from draftmill.contracts.errors import RecipeError  # noqa: E402
from draftmill.extract.target import Target, freeze, load_target  # noqa: E402
from draftmill.model.checkpoint import save_drafter  # noqa: E402
from draftmill.model.drafter import Drafter  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.train.start import copy_layers, drafter_shape, initial_drafter, refuse_too_large, source_layers  # noqa: E402
from tiny import write_tiny_target  # noqa: E402
from tiny_families import HIDDEN, tiny_model  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_tiny_target(tmp_path_factory.mktemp("target"), family=request.param))


def settings(**changed: object) -> TrainSettings:
    chosen = {"num_layers": 2, "num_taps": 3, "block_size": 8, **changed}
    return TrainSettings(input="in", output=("out",), target="t", **chosen)  # type: ignore[arg-type]


def test_the_shape_is_the_targets_with_full_rotary(target: Target) -> None:
    shape = drafter_shape(target, settings(), mask_id=270)
    assert (shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (64, 4, 2, 16)
    assert (shape.vocab_size, shape.rope_theta, shape.num_target_layers) == (272, 10_000.0, 6)
    assert (shape.tap_ids, shape.mask_id, shape.is_causal) == ((1, 2, 3), 270, False)


def test_settings_overrule_the_targets_shape(target: Target) -> None:
    chosen = settings(num_heads=8, num_kv_heads=4, head_dim=32, num_sliding_layers=1, sliding_window=9, tap_ids=(0, 4))
    shape = drafter_shape(target, chosen, mask_id=270)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.tap_ids) == (8, 4, 32, (0, 4))
    assert (shape.layer_types, shape.sliding_window) == (("sliding_attention", "full_attention"), 9)
    assert shape.is_causal is None


def test_heads_wider_than_a_drafters_are_never_copied(tmp_path: Path) -> None:
    wide = load_target(write_tiny_target(tmp_path, hidden_size=1024, num_layers=4, vocab_size=262))
    shape = drafter_shape(wide, settings(num_taps=1), mask_id=0)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (8, 2, 128)
    chosen = drafter_shape(wide, settings(num_taps=1, head_dim=64, num_heads=4, num_kv_heads=1), mask_id=0)
    assert (chosen.num_heads, chosen.num_kv_heads, chosen.head_dim) == (4, 1, 64)


def test_a_mixture_of_experts_gives_its_drafter_a_dense_layer() -> None:
    for family, width in (("qwen3_moe", 64), ("qwen3_5_moe", 3 * HIDDEN)):
        shape = drafter_shape(freeze(tiny_model(family)), settings(num_taps=1), mask_id=0)
        assert (shape.intermediate_size, shape.head_dim) == (width, 16)


def test_copied_gains_mean_in_the_drafter_what_they_meant_in_a_hybrid_target() -> None:
    target = freeze(tiny_model("qwen3_5"))
    drafter = Drafter(replace(drafter_shape(target, settings(num_taps=1), mask_id=0), num_heads=4))
    with pytest.raises(RecipeError, match="q_proj"):  # its queries carry a gate, which a drafter has not
        copy_layers(drafter, target)
    states = torch.randn(3, HIDDEN)
    layer = target.layers[3]
    expected = layer.get_submodule("input_layernorm")(states)
    torch.testing.assert_close(drafter.layers[0].input_layernorm(states), expected, rtol=1e-5, atol=1e-5)


def test_the_same_seed_gives_the_same_weights_and_another_one_others(target: Target) -> None:
    one, same, other = (initial_drafter(target, settings(seed=seed), 270) for seed in (1, 1, 2))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert one.fc.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_copied_layers_are_the_targets_last_ones_over_its_last_tap(target: Target) -> None:
    drafter = initial_drafter(target, settings(init="target"), 270)
    assert source_layers(2, 6) == (4, 5)
    for mine, theirs in zip(drafter.layers, (target.layers[4], target.layers[5]), strict=True):
        given = dict(theirs.named_parameters())
        assert all(torch.equal(p, given[name]) for name, p in mine.named_parameters() if name in given)
        assert len(given) in (9, 11)
    assert torch.equal(drafter.norm.weight, target.norm.weight)
    features = torch.randn(5, 3 * 64)
    torch.testing.assert_close(drafter.fc(features), features[:, 128:], atol=0.15, rtol=0)
    assert torch.equal(drafter.hidden_norm.weight, target.layers[4].input_layernorm.weight)


def test_layers_of_another_shape_are_not_copied(target: Target) -> None:
    with pytest.raises(RecipeError, match=r"q_proj.weight is \[64, 64\], the drafter's \[128, 64\]"):
        initial_drafter(target, settings(init="target", num_heads=8), 270)


def test_a_run_can_go_on_from_a_published_drafter_of_its_shape_only(target: Target, tmp_path: Path) -> None:
    published = initial_drafter(target, settings(seed=3), 270)
    save_drafter(tmp_path, published, torch.bfloat16)
    start = initial_drafter(target, settings(init=str(tmp_path), seed=9), 270)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in start.parameters())
    pairs = zip(start.parameters(), published.parameters(), strict=True)
    assert all(torch.equal(mine, theirs.bfloat16().float()) for mine, theirs in pairs)
    with pytest.raises(RecipeError, match=r"block_size 8 instead of 4; mask_id 270 instead of 271"):
        initial_drafter(target, settings(init=str(tmp_path), block_size=4), 271)


def test_a_drafter_larger_than_the_memory_is_refused_before_it_is_made(target: Target) -> None:
    shape = drafter_shape(target, settings(), mask_id=270)
    num_bytes = 4 * sum(parameter.numel() for parameter in Drafter(shape).parameters())
    refuse_too_large(shape, num_bytes)
    with pytest.raises(RecipeError, match=r"a drafter of [0-9,]+ weights takes .* GB.*--num-layers"):
        refuse_too_large(shape, num_bytes - 1)
    with pytest.raises(RecipeError, match="--intermediate-size"):
        initial_drafter(target, settings(intermediate_size=1 << 20, num_layers=1 << 12), mask_id=270)
