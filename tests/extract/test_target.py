"""A target is loaded whole and frozen, or refused with what was looked for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftmill.contracts.errors import InputError
from draftmill.extract.target import freeze, load_target
from tiny import VOCAB_SIZE, write_tiny_target, write_tiny_tokenizer

pytestmark = pytest.mark.torch


def test_a_target_says_its_shape_and_takes_no_gradients(tmp_path: Path) -> None:
    target = load_target(write_tiny_target(tmp_path, num_layers=3, hidden_size=32))
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (3, 32, VOCAB_SIZE)
    assert (target.rope_theta, target.max_positions) == (10_000.0, 512)
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())


def test_tied_embeddings_are_one_matrix(tmp_path: Path) -> None:
    target = load_target(write_tiny_target(tmp_path, num_layers=2, tie_word_embeddings=True))
    assert target.head.weight.data_ptr() == target.embed.weight.data_ptr()


def test_missing_weights_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path, num_layers=2)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 .*layers\.1\.mlp\.up_proj"):
        load_target(folder)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        load_target(tmp_path)
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InputError, match="cannot be loaded"):
        load_target(tmp_path)


@pytest.mark.parametrize("num_kept", [0, 1000])
def test_weights_that_are_cut_are_refused(tmp_path: Path, num_kept: int) -> None:
    weights = write_tiny_target(tmp_path, num_layers=1) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:num_kept])
    with pytest.raises(InputError, match=f"{tmp_path} cannot be loaded .*SafetensorError"):
        load_target(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"num_hidden_layers": "four"}, "expected int, got str"),
        ({"hidden_size": 33}, "not a multiple"),
        ({"rope_parameters": {"rope_type": "none such", "rope_theta": 1e4}}, "none such"),
        ({"hidden_act": "none such"}, "none such"),
        ({"vocab_size": 0}, "Padding_idx"),
        ({"text_config": 5}, "AttributeError"),
        ({"quantization_config": 5}, "AttributeError"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_with_the_reason(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    _change_config(write_tiny_target(tmp_path, num_layers=1), change)
    with pytest.raises(InputError, match=f"{tmp_path} cannot be loaded .*{reason}"):
        load_target(tmp_path)


def test_layers_that_the_config_does_not_count_are_refused_but_for_those_that_draft(tmp_path: Path) -> None:
    _change_config(write_tiny_target(tmp_path, num_layers=3), {"num_hidden_layers": 2})
    with pytest.raises(InputError, match=r"weights of decoder layer 2, but its config\.json counts 2 layers"):
        load_target(tmp_path)
    _change_config(tmp_path, {"num_nextn_predict_layers": 1})
    assert load_target(tmp_path).num_layers == 2


def test_weights_of_a_vision_tower_and_of_drafting_layers_are_no_decoder_layers(tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path, num_layers=2)
    weights = load_file(folder / "model.safetensors")
    others = ("mtp.layers.9.q.weight", "model.visual.blocks.9.q.weight", "vision_tower.encoder.layers.9.q.weight")
    save_file(weights | {name: torch.ones(1) for name in others}, folder / "model.safetensors", {"format": "pt"})
    assert load_target(folder).num_layers == 2


def _change_config(folder: Path, change: dict[str, object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))


def test_an_unknown_architecture_is_refused_with_what_was_looked_for() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
    with pytest.raises(InputError, match=r"GPT2LMHeadModel.*model\.language_model\.layers.*lie at transformer\.h"):
        freeze(model)


def test_the_target_computes_in_the_dtype_asked_for(tmp_path: Path) -> None:
    target = load_target(write_tiny_target(tmp_path, num_layers=1), dtype=torch.bfloat16)
    assert target.embed.weight.dtype == torch.bfloat16
