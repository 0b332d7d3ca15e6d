"""A quantized target is read as it is served: never in its float weights, never with a quantized head."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftmill.contracts.errors import InputError, RecipeError
from draftmill.extract.spread import place
from draftmill.extract.taps import TapReader, check_taps
from draftmill.extract.target import freeze, load_target
from draftmill.settings.train import TrainSettings
from draftmill.train.start import initial_drafter
from tiny import write_tiny_target
from tiny_families import tiny_model

pytestmark = pytest.mark.torch

TAPS = (0, 2, 4)
LEVELS = 7  # four bits: far enough from the float weights to be told apart
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "int-quantized",
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
}


def quantize(folder: Path, config: dict[str, Any], *, head: bool = False) -> dict[str, torch.Tensor]:
    """Rewrites a float model's folder as compressed-tensors writes one; returns the weights that it then stands for."""
    weights = load_file(folder / "model.safetensors")
    stored, meant = {}, dict(weights)
    for name, weight in weights.items():
        is_layers = name.endswith("_proj.weight") and "linear_attn" not in name
        if not is_layers and not (head and name == "lm_head.weight"):
            stored[name] = weight
            continue
        scale = weight.abs().amax(dim=1, keepdim=True) / LEVELS
        levels = (weight / scale).round()
        stored[name], stored[name.replace(".weight", ".weight_scale")] = levels.to(torch.int8), scale
        meant[name] = levels * scale
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    declare(folder, config)
    return meant


def declare(folder: Path, config: dict[str, Any]) -> None:
    """Writes into a model's config how it is quantized."""
    declared = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**declared, "quantization_config": config}))


def ids() -> torch.Tensor:
    return torch.randint(3, 90, (2, 14), generator=torch.Generator().manual_seed(1))


def features(model: Any, taps: tuple[int, ...] = TAPS) -> torch.Tensor:
    with torch.no_grad():
        states = model(input_ids=ids(), output_hidden_states=True).hidden_states
    return torch.cat([states[tap + 1] for tap in taps], dim=-1)


def test_features_are_those_of_the_quantized_weights(tmp_path: Path) -> None:
    plain = load_target(write_tiny_target(tmp_path)).model
    meant = quantize(tmp_path, INT4)
    target = load_target(tmp_path)
    reader = TapReader(target, TAPS)
    found = reader.read(ids(), torch.tensor([14, 14]))
    assert torch.equal(found, features(target.model))
    check_taps(reader, ids())
    assert (found - features(plain)).abs().max() > 0.1
    plain.load_state_dict(meant, strict=False)
    torch.testing.assert_close(found, features(plain), rtol=1e-4, atol=1e-4)


def test_a_quantized_wrapper_is_read_as_its_quantized_language_model(tmp_path: Path) -> None:
    wrapper = tiny_model("qwen3_5_wrapper")
    wrapper.save_pretrained(tmp_path)
    quantize(tmp_path, {**INT4, "ignore": ["lm_head", "re:.*visual.*", "re:.*linear_attn.*"]})
    target = load_target(tmp_path)
    found = TapReader(target, (0, 2, 3)).read(ids(), torch.tensor([14, 14]))
    assert torch.equal(found, features(target.model, (0, 2, 3)))
    assert (found - features(wrapper, (0, 2, 3))).abs().max() > 0.1


def test_a_format_without_kernels_here_is_refused_and_not_read_as_floats(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if "_proj." in name]:
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        weights[name + "_scale_inv"] = torch.ones(1, 1)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    declare(tmp_path, fp8)
    with pytest.raises(InputError, match=r"quantized \(fp8\), and transformers loaded its weights as floats"):
        load_target(tmp_path)


def test_a_method_that_is_not_known_is_refused_and_not_left_out(tmp_path: Path) -> None:
    declare(write_tiny_target(tmp_path), {"quant_method": "of-next-year"})
    with pytest.raises(InputError, match=r"quantized \(of-next-year\)"):
        load_target(tmp_path)


def test_a_quantized_head_cannot_be_borrowed(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    quantize(tmp_path, {**INT4, "ignore": []}, head=True)
    with pytest.raises(InputError, match=r"borrows the target's lm_head.*plain floats.*int8.*ignored"):
        load_target(tmp_path)


def test_an_embedding_of_another_kind_of_number_cannot_be_borrowed() -> None:
    model = tiny_model("llama")
    model.model.embed_tokens.weight = torch.nn.Parameter(
        model.model.embed_tokens.weight.to(torch.float8_e4m3fn), requires_grad=False
    )
    with pytest.raises(InputError, match=r"borrows the target's embedding.*float8_e4m3fn"):
        freeze(model)


def test_quantized_layers_are_not_copied_into_a_drafter(tmp_path: Path) -> None:
    target = load_target(write_tiny_target(tmp_path))
    weight = target.layers[5].self_attn.q_proj.weight
    weight.data = weight.data.to(torch.float8_e4m3fn)
    given = {"num_layers": 1, "num_taps": 2, "block_size": 8}
    settings = TrainSettings(input="in", output=("out",), target="t", init="target", **given)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"q_proj.weight is quantized \(torch.float8_e4m3fn\): start at random"):
        initial_drafter(target, settings, 270)


def test_quantized_weights_are_not_spread_over_devices(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    quantize(tmp_path, INT4)
    with pytest.raises(InputError, match=r"LlamaForCausalLM is quantized \(compressed-tensors\).*set --target-gpus 1"):
        place(load_target(tmp_path), [torch.device("cpu"), torch.device("meta")])
