"""Features are the target's own hidden states, bit for bit, and reading them leaves the target as it was."""

from pathlib import Path

import pytest
import torch
from torch import nn

from draftmill.contracts.errors import InputError, RecipeError
from draftmill.extract.taps import Captured, TapReader, check_taps
from draftmill.extract.target import Target, load_target
from tiny import write_tiny_target

pytestmark = pytest.mark.torch

TAPS = (0, 2, 4)
# Features are of the order of 10 here; the order of summation differs with the shape of the batch.
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_tiny_target(tmp_path_factory.mktemp(request.param), family=request.param))


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 250, shape, generator=torch.Generator().manual_seed(seed))


def whole(ids_RT: torch.Tensor) -> torch.Tensor:
    return torch.full((ids_RT.shape[0],), ids_RT.shape[1])


def hidden_states(target: Target, ids_RT: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return target.model(input_ids=ids_RT, output_hidden_states=True).hidden_states


def test_a_tap_is_the_hidden_state_after_its_layer(target: Target) -> None:
    ids_RT = random_ids(3, 20)
    states = hidden_states(target, ids_RT)
    expected = torch.cat([states[i + 1] for i in TAPS], dim=-1)
    assert torch.equal(TapReader(target, TAPS).read(ids_RT, whole(ids_RT)), expected)


def test_no_layer_after_the_last_tap_is_run_and_the_target_stays_whole(target: Target) -> None:
    ids_RT, last = random_ids(1, 8), target.num_layers - 1
    fired: list[int] = []
    hook = target.layers[last].register_forward_hook(lambda *_: fired.append(last))
    TapReader(target, TAPS[:2]).read(ids_RT, whole(ids_RT))
    assert not fired
    hidden_states(target, ids_RT)
    hook.remove()
    assert fired == [last]


def test_the_last_layer_differs_from_the_last_hidden_state_by_the_final_norm(target: Target) -> None:
    ids_RT = random_ids(2, 12)
    last = target.num_layers - 1
    captured = Captured((last,))
    hook = target.layers[last].register_forward_hook(lambda m, a, o: captured._take(last, m, a, o))
    states = hidden_states(target, ids_RT)
    hook.remove()
    assert not torch.allclose(captured.features(), states[-1])
    assert torch.equal(target.norm(captured.features()), states[-1])
    with pytest.raises(RecipeError, match="never a tap"):
        TapReader(target, (0, last))


def test_right_padding_changes_no_feature_of_the_document(target: Target) -> None:
    ids_RT, lengths_R = random_ids(3, 24), torch.tensor([24, 9, 17])
    together = TapReader(target, TAPS).read(ids_RT, lengths_R)
    for row, length in enumerate(lengths_R.tolist()):
        alone = TapReader(target, TAPS).read(ids_RT[row : row + 1, :length], lengths_R[row : row + 1])
        torch.testing.assert_close(together[row : row + 1, :length], alone, **ROUNDING)
        assert not together[row, length:].any()


def test_neither_the_head_nor_gradients_take_part(target: Target) -> None:
    ids_RT = random_ids(2, 8)
    calls = []
    hook = target.head.register_forward_hook(lambda *_: calls.append(1))
    features = TapReader(target, TAPS).read(ids_RT, whole(ids_RT))
    hook.remove()
    assert not calls
    projection = nn.Linear(features.shape[-1], 4)
    projection(features).sum().backward()
    assert projection.weight.grad is not None
    assert features.grad_fn is None
    assert not any(p.requires_grad or p.grad is not None for p in target.model.parameters())


def test_features_of_cached_decoding_are_those_of_one_pass(target: Target) -> None:
    from transformers import DynamicCache

    ids_RT = random_ids(2, 15)
    reader = TapReader(target, TAPS)
    cache = DynamicCache(config=target.config)
    pieces = []
    for start, end in ((0, 6), (6, 7), (7, 15)):
        with torch.no_grad(), reader.capturing() as captured:
            target.model(ids_RT[:, start:end], None, None, cache)
        pieces.append(captured.features())
    torch.testing.assert_close(torch.cat(pieces, dim=1), reader.read(ids_RT, whole(ids_RT)), **ROUNDING)


def test_a_hook_that_fires_twice_or_never_is_an_error(target: Target) -> None:
    ids_RT = random_ids(1, 4)
    reader = TapReader(target, TAPS)
    with reader.capturing() as captured:
        pass
    with pytest.raises(AssertionError, match="once"):
        captured.features()
    with torch.no_grad(), reader.capturing() as captured:
        target.backbone(ids_RT)
        target.backbone(ids_RT)
    with pytest.raises(AssertionError, match="once"):
        captured.features()


def test_no_hook_stays_behind(target: Target) -> None:
    reader = TapReader(target, TAPS)
    before = [len(layer._forward_hooks) for layer in target.layers]
    with pytest.raises(RuntimeError, match="inside"), reader.capturing():
        raise RuntimeError("inside")
    assert [len(layer._forward_hooks) for layer in target.layers] == before


def test_layers_may_answer_with_a_tensor_or_a_tuple_and_write_over_it_later() -> None:
    for wrap in (lambda states: states, lambda states: (states, None)):
        states = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
        expected = states.clone()
        captured = Captured((0,))
        captured._take(0, nn.Identity(), (), wrap(states))
        states.zero_()
        assert torch.equal(captured.features(), expected)


def test_what_layers_give_on_any_device_is_brought_to_one() -> None:
    here, there = torch.device("cpu"), torch.device("meta")
    captured = Captured((0, 1), last_id=2, device=there)
    for layer, device in enumerate((here, there, here)):
        captured._take(layer, nn.Identity(), (), torch.ones(1, 3, 4, device=device))
    last = captured.last()
    assert last is not None and captured.features().device == last.device == there


def test_the_start_up_check_passes_a_target_and_refuses_what_is_none(target: Target) -> None:
    check_taps(TapReader(target, TAPS), random_ids(2, 10))
    with pytest.raises(InputError, match="same at every position"):
        check_taps(TapReader(target, TAPS), torch.full((2, 10), 7))


def test_the_start_up_check_tells_states_that_are_not_finite_from_other_layers(tmp_path: Path) -> None:
    broken = load_target(write_tiny_target(tmp_path))
    broken.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(InputError, match="tap 0 holds numbers that are not finite"):
        check_taps(TapReader(broken, TAPS), random_ids(2, 10))


def test_the_start_up_check_sees_layers_that_are_not_the_models(target: Target) -> None:
    swapped = Target(
        model=target.model,
        backbone=target.backbone,
        layers=nn.ModuleList(reversed(list(target.layers))),
        embed=target.embed,
        head=target.head,
        norm=target.norm,
        config=target.config,
        family=target.family,
    )
    with pytest.raises(InputError, match=r"tap 0 is not hidden_states\[1\]"):
        check_taps(TapReader(swapped, TAPS), random_ids(2, 10))
