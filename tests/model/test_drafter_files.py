"""A drafter's folder is the z-lab layout, comes back bit for bit, and is refused by name where it does not fit."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from draftmill.contracts.errors import InputError  # noqa: E402
from draftmill.model.checkpoint import copy_of, load_drafter, save_drafter  # noqa: E402
from draftmill.model.drafter import Drafter  # noqa: E402
from draftmill.model.shape import DrafterShape  # noqa: E402

pytestmark = pytest.mark.torch

FULL, SLIDING = "full_attention", "sliding_attention"


def shape(*layer_types: str, sliding_window: int | None = None) -> DrafterShape:
    return DrafterShape(
        hidden_size=32,
        num_layers=len(layer_types),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=48,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        max_positions=512,
        vocab_size=60,
        block_size=8,
        tap_ids=(0, 2),
        mask_id=59,
        num_target_layers=6,
        layer_types=layer_types,
        sliding_window=sliding_window,
    )


def test_a_drafter_comes_back_bit_for_bit(tmp_path: Path) -> None:
    drafter = Drafter(shape(FULL, FULL))
    save_drafter(tmp_path, drafter)
    loaded = load_drafter(tmp_path)
    assert loaded.shape == drafter.shape
    assert all(torch.equal(p, q) for p, q in zip(drafter.parameters(), loaded.parameters(), strict=True))
    save_drafter(tmp_path / "narrow", drafter, torch.bfloat16)
    assert load_drafter(tmp_path / "narrow").fc.weight.dtype == torch.bfloat16
    assert json.loads((tmp_path / "narrow" / "config.json").read_text())["dtype"] == "bfloat16"


def test_tensors_are_those_of_the_layout_eleven_a_layer_and_three(tmp_path: Path) -> None:
    save_drafter(tmp_path, Drafter(shape(FULL, FULL, FULL)))
    names = set(load_file(tmp_path / "model.safetensors"))
    assert len(names) == 11 * 3 + 3
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.2.self_attn.k_norm.weight"} <= names


def test_the_drafter_of_the_27b_target_has_its_published_size() -> None:
    with torch.device("meta"):
        drafter = Drafter(
            DrafterShape(
                hidden_size=5120,
                num_layers=5,
                num_heads=32,
                num_kv_heads=8,
                head_dim=128,
                intermediate_size=17408,
                rms_norm_eps=1e-6,
                rope_theta=1e7,
                max_positions=262144,
                vocab_size=248320,
                block_size=16,
                tap_ids=(1, 16, 31, 46, 61),
                mask_id=248070,
                num_target_layers=64,
                layer_types=(SLIDING,) * 4 + (FULL,),
                sliding_window=2048,
            )
        )
    assert len(drafter.state_dict()) == 58
    assert sum(p.numel() for p in drafter.parameters()) == 1_730_213_120


def test_the_config_says_both_rope_forms_and_the_slot_convention() -> None:
    config = shape(FULL, FULL).to_config()
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e7
    assert config["sample_from_anchor"] is False and config["is_causal"] is False
    assert config["dflash_config"]["target_layer_ids"] == [0, 2]


@pytest.mark.parametrize(
    ("layers", "window", "is_causal"),
    [((FULL, FULL), None, False), ((SLIDING, SLIDING), 7, True), ((SLIDING, FULL), 7, None)],
)
def test_every_kind_of_layers_survives_its_config(layers: tuple[str, ...], window: int | None, is_causal: bool) -> None:
    original = shape(*layers, sliding_window=window)
    assert original.is_causal is is_causal
    assert DrafterShape.from_config(original.to_config()) == original


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_rope_theta_is_read_from_either_form_and_never_guessed(form: str) -> None:
    config = shape(FULL).to_config()
    del config["rope_parameters" if form == "flat" else "rope_theta"]
    assert DrafterShape.from_config(config).rope_theta == 1e7
    config.pop("rope_theta", None)
    config["rope_parameters"] = {"rope_type": "default"}
    with pytest.raises(InputError, match="rope_theta"):
        DrafterShape.from_config(config)


@pytest.mark.parametrize("key", ["dflash_config", "block_size", "hidden_size", "layer_types", "num_target_layers"])
def test_a_missing_key_is_named(key: str) -> None:
    config = shape(FULL).to_config()
    del config[key]
    with pytest.raises(InputError, match=f"names no {key}"):
        DrafterShape.from_config(config)


def test_another_slot_convention_or_causality_is_refused() -> None:
    config = shape(FULL).to_config()
    with pytest.raises(InputError, match="sample_from_anchor is true"):
        DrafterShape.from_config(config | {"sample_from_anchor": True})
    with pytest.raises(InputError, match="is_causal = True"):
        DrafterShape.from_config(config | {"is_causal": True})


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    save_drafter(tmp_path, Drafter(shape(FULL)))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_tokens.weight"] = tensors.pop("norm.weight")
    tensors["fc.weight"] = tensors["fc.weight"][:, :32].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    says = (
        r"embed_tokens.weight is not a drafter's; fc.weight is \[32, 32\] instead of \[32, 64\]; norm.weight is missing"
    )
    with pytest.raises(InputError, match=says):
        load_drafter(tmp_path)


@pytest.mark.parametrize(("name", "number"), [("fc.weight", "nan"), ("norm.weight", "inf"), ("norm.weight", "-inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, name: str, number: str) -> None:
    drafter = Drafter(shape(FULL))
    with torch.no_grad():
        dict(drafter.named_parameters())[name].flatten()[-1] = float(number)
    save_drafter(tmp_path, drafter)
    with pytest.raises(InputError, match=rf"1 of 14 tensors are not finite \({name}\)"):
        load_drafter(tmp_path)


def test_a_folder_without_weights_is_no_drafters(tmp_path: Path) -> None:
    save_drafter(tmp_path, Drafter(shape(FULL)))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no model\.safetensors"):
        load_drafter(tmp_path)


class Made(TorchDispatchMode):
    """Where conversions write."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.devices.add(result.device.type)
        return result


def test_a_copy_for_another_device_is_made_there_and_takes_no_room_where_the_weights_are() -> None:
    """A full device has no room for it."""
    drafter = Drafter(shape(FULL))
    with Made() as made:
        copied = copy_of(drafter, torch.bfloat16, torch.device("meta"))
    assert made.devices == {"meta"}
    assert {(p.device.type, p.dtype) for p in copied.parameters()} == {("meta", torch.bfloat16)}
    assert all(p.device.type == "cpu" and p.dtype == torch.float32 for p in drafter.parameters())
    with Made() as made:
        copy_of(drafter, torch.bfloat16)
    assert made.devices == {"cpu"}
