"""The frozen target: a Hugging Face causal LM and the parts of it that a drafter reads or borrows.

Llama-like, Qwen3-like and Qwen3.5-text models are known by the module paths in `BACKBONES`; a family that lies
elsewhere is added there.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

from draftmill.contracts.errors import InputError

# A transformers PreTrainedModel. Importing that class takes 4 s, which a command that finds its work done would pay.
Pretrained = Any
# Where the decoder stack lies: plain causal LMs first, then language models inside vision-language wrappers.
BACKBONES = ("model", "model.language_model", "language_model.model")


@dataclass(frozen=True)
class Target:
    """One loaded target; nothing in it takes gradients."""

    model: Pretrained
    """The causal LM, in eval mode."""
    backbone: nn.Module
    """The decoder stack with embedding and final norm: what runs without the head."""
    layers: nn.ModuleList
    embed: nn.Embedding
    head: nn.Linear
    norm: nn.Module
    config: PreTrainedConfig
    """The text model's config."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.embed.embedding_dim

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table, which may be more than the tokenizer has tokens."""
        return self.embed.num_embeddings

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies; InputError where the config names none, for a default would be a guess."""
        found = (self.config.rope_parameters or {}).get("rope_theta")
        if found is None:
            raise InputError(
                f"{self.config.name_or_path}: no rope_theta in rope_parameters {self.config.rope_parameters}; "
                "write it into the target's config.json"
            )
        return float(found)

    @property
    def max_positions(self) -> int:
        """Tokens in the target's window."""
        return int(self.config.max_position_embeddings)

    @property
    def device(self) -> torch.device:
        """Where the target computes."""
        return self.embed.weight.device


def load_target(folder: Path, dtype: torch.dtype = torch.float32) -> Target:
    """The target in a Hugging Face folder, frozen; InputError where it has no weights or an unknown shape."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} holds no config.json: it is not a Hugging Face model folder")
    disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} cannot be loaded as a causal language model: {error}") from error
    model, report = loaded
    # transformers fills what a checkpoint lacks with random numbers; such a target would train a drafter for nobody.
    if lacking := sorted(report["missing_keys"]):
        raise InputError(f"{folder} lacks {len(lacking)} of the target's weights, among them {lacking[:3]}")
    return freeze(model)


def freeze(model: Pretrained) -> Target:
    """The target around a loaded model, which is put into eval mode and takes no gradients from now on."""
    model.eval().requires_grad_(False)
    modules = dict(model.named_modules())
    path = next((path for path in BACKBONES if isinstance(modules.get(f"{path}.layers"), nn.ModuleList)), None)
    head, embed = model.get_output_embeddings(), model.get_input_embeddings()
    if path is None or f"{path}.norm" not in modules:
        raise InputError(
            f"{type(model).__name__} is not a target draftmill knows: looked for a list of decoder layers and a norm "
            f"at {', '.join(f'{path}.layers' for path in BACKBONES)}; add its path to BACKBONES in extract/target.py"
        )
    if not isinstance(head, nn.Linear) or not isinstance(embed, nn.Embedding):
        raise InputError(
            f"{type(model).__name__}: wanted a linear head and an embedding table, found {type(head).__name__} "
            f"and {type(embed).__name__}"
        )
    layers = modules[f"{path}.layers"]
    assert isinstance(layers, nn.ModuleList)
    return Target(
        model=model,
        backbone=modules[path],
        layers=layers,
        embed=embed,
        head=head,
        norm=modules[f"{path}.norm"],
        config=model.config.get_text_config(),
    )
