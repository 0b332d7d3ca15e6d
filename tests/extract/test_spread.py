"""A target spread over several places is read as it is read in one, bit for bit; what is borrowed of it lies in one.

accelerate's hooks are really at work without a GPU: a place called disk keeps no weights, and each call loads them.
"""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from accelerate.utils import check_device_map

from draftmill.contracts.errors import RecipeError
from draftmill.extract.decode import decode_greedy
from draftmill.extract.packing import can_pack
from draftmill.extract.spread import device_map, ends_on, layer_runs, place, spread
from draftmill.extract.taps import TapReader, check_taps
from draftmill.extract.target import Ends, Target, freeze
from tiny_families import FAMILIES, LAYERS, VOCAB, tiny_model

pytestmark = pytest.mark.torch

CPU, META = torch.device("cpu"), torch.device("meta")
TAPS = (0, 2, 3)
THREE = ("cpu", "disk", "cpu")
# The convolution of linear attention is used without being called, so that no hook would load it: of five layers, the
# one on disk has full attention.
FIVE = ("cpu", "cpu", "disk", "cpu", "cpu")
PLACES = {"llama": THREE, "qwen3_moe": THREE, "qwen3_5": FIVE, "qwen3_5_wrapper": FIVE}


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(1))


def spread_target(family: str, folder: Path, places: Sequence[str] | None = None) -> Target:
    """A tiny target of which some layers lie on disk."""
    target = freeze(tiny_model(family))
    spread(target, places or PLACES[family], folder)
    assert any(p.device == META for p in target.layers.parameters()), "some weights are on disk"
    return target


def tied_target() -> Target:
    model = tiny_model("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    return freeze(model)


@pytest.mark.parametrize("family", PLACES)
def test_features_and_last_states_are_those_of_the_target_in_one_place(family: str, tmp_path: Path) -> None:
    ids_RT, lengths_R = ids(2, 14), torch.tensor([14, 9])
    alone = TapReader(freeze(tiny_model(family)), TAPS, has_last=True).read_states(ids_RT, lengths_R)
    apart = TapReader(spread_target(family, tmp_path), TAPS, has_last=True).read_states(ids_RT, lengths_R)
    assert torch.equal(apart.features_RTF, alone.features_RTF)
    assert apart.last_RTH is not None and alone.last_RTH is not None
    assert torch.equal(apart.last_RTH, alone.last_RTH)


@pytest.mark.parametrize("family", PLACES)
def test_a_spread_target_passes_the_check_of_its_taps(family: str, tmp_path: Path) -> None:
    check_taps(TapReader(spread_target(family, tmp_path), TAPS), ids(2, 12))


def test_a_spread_target_writes_what_it_writes_in_one_place(tmp_path: Path) -> None:
    prompts = [ids(9).tolist(), ids(4).tolist()]
    alone = decode_greedy(freeze(tiny_model("llama")), prompts, frozenset({7}), 8)
    assert decode_greedy(spread_target("llama", tmp_path), prompts, frozenset({7}), 8) == alone


def test_no_layer_after_the_last_tap_is_run_on_a_spread_target_either(tmp_path: Path) -> None:
    target, fired = spread_target("llama", tmp_path), []
    for i in (3, 4):
        target.layers[i].register_forward_hook(lambda *_, i=i: fired.append(i))
    TapReader(target, (0, 3)).read(ids(1, 6), torch.tensor([6]))
    assert fired == [3]


def test_whether_documents_may_be_packed_is_measured_on_a_spread_target_too(tmp_path: Path) -> None:
    assert can_pack(TapReader(spread_target("llama", tmp_path / "plain"), TAPS))
    assert not can_pack(TapReader(spread_target("qwen3_5", tmp_path / "hybrid"), TAPS))


def test_a_spread_target_stays_frozen(tmp_path: Path) -> None:
    target = spread_target("llama", tmp_path)
    features = TapReader(target, TAPS).read(ids(1, 6), torch.tensor([6]))
    assert features.grad_fn is None and target.device == CPU
    assert not any(p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_and_buffer_has_one_place_and_layers_follow_each_other(family: str) -> None:
    target = freeze(tiny_model(family))
    where = device_map(target, ("a", "b", "c"))
    check_device_map(target.model, where)
    placed = {id(tensor): set() for tensor in (*target.model.parameters(), *target.model.buffers())}
    modules = dict(target.model.named_modules())
    for name, here in where.items():
        for tensor in (*modules[name].parameters(), *modules[name].buffers()):
            placed[id(tensor)].add(here)
    assert all(len(places) == 1 for places in placed.values())
    layers = [placed[id(next(layer.parameters()))].pop() for layer in target.layers]
    assert layers == ["a", "b", "b", "c", "c"]
    ends = [placed[id(part.weight)].pop() for part in (target.embed, target.norm, target.head)]
    assert ends == ["a", "c", "c"]
    rotary = next(buffer for name, buffer in target.model.named_buffers() if name.endswith("rotary_emb.inv_freq"))
    assert placed[id(rotary)] == {"a"}


def test_a_head_that_is_the_embedding_stays_with_it(tmp_path: Path) -> None:
    where = device_map(tied_target(), ("a", "b"))
    assert (where["lm_head"], where["model.embed_tokens"], where["model.norm"]) == ("a", "a", "b")
    target = tied_target()
    spread(target, THREE, tmp_path)
    assert target.head.weight is target.embed.weight
    assert torch.equal(target.model(ids(1, 5)).logits, tied_target().model(ids(1, 5)).logits)


def test_places_take_runs_of_layers_that_differ_by_one_at_most() -> None:
    assert layer_runs(5, 2) == [range(0, 2), range(2, 5)]
    for num_layers in range(1, 20):
        for num_places in range(1, num_layers + 1):
            runs = layer_runs(num_layers, num_places)
            assert [layer for run in runs for layer in run] == list(range(num_layers))
            sizes = [len(run) for run in runs]
            assert len(sizes) == num_places and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


def test_more_devices_than_layers_are_refused() -> None:
    with pytest.raises(RecipeError, match=rf"--target-gpus {LAYERS + 1}: the target has {LAYERS} layers"):
        place(freeze(tiny_model("llama")), [CPU] * (LAYERS + 1))


def test_ends_are_lent_where_they_lie_on_the_device_asked_for(tmp_path: Path) -> None:
    target = spread_target("llama", tmp_path)
    lent = ends_on(target, CPU)
    assert lent.embed is target.embed and lent.norm is target.norm and lent.head is target.head
    assert not isinstance(lent, Target)


def test_ends_that_lie_elsewhere_are_copied_without_what_moved_their_inputs(tmp_path: Path) -> None:
    target = spread_target("llama", tmp_path)
    norm = deepcopy(freeze(tiny_model("llama")).norm).to("meta")
    lent = ends_on(Ends(target.embed, norm, target.head), META)
    assert lent.norm is norm
    # With accelerate's hook they would bring what they are given back to the CPU.
    hidden = lent.embed(torch.zeros(1, 3, dtype=torch.long, device=META))
    assert hidden.device == lent.head(lent.norm(hidden)).device == META
    assert target.embed.weight.device == target.head.weight.device == CPU
    assert not lent.embed.weight.requires_grad


def test_copied_ends_that_are_one_matrix_stay_one() -> None:
    lent = ends_on(tied_target(), META)
    assert lent.head.weight is lent.embed.weight and lent.device == META
