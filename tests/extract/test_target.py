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


def test_an_unknown_architecture_is_refused_with_what_was_looked_for() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
    with pytest.raises(InputError, match=r"GPT2LMHeadModel.*model\.language_model\.layers.*lie at transformer\.h"):
        freeze(model)


def test_the_target_computes_in_the_dtype_asked_for(tmp_path: Path) -> None:
    target = load_target(write_tiny_target(tmp_path, num_layers=1), dtype=torch.bfloat16)
    assert target.embed.weight.dtype == torch.bfloat16
