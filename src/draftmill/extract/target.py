"""The frozen target: a Hugging Face causal LM and the parts of it that a drafter reads or borrows.

Where they lie is the family's (`families.py`). A folder of a vision-language wrapper is loaded as its language model.
Weights stay in the precision they are served in (`quantized.py`).
"""

import logging
import pickle
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

from draftmill.contracts.errors import InputError
from draftmill.extract.families import Family, find_parts
from draftmill.extract.quantized import refuse_dequantized, refuse_quantized_parts, unpack
from draftmill.storage.models import read_config

log = logging.getLogger(__name__)

# A transformers PreTrainedModel. Importing that class takes 4 s, which a command that finds its work done would pay.
Pretrained = Any
# What a target is computed in, as settings name it.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Packages whose kernels linear attention needs on CUDA; without them transformers falls back to a slow loop.
HYBRID_PACKAGES = ("fla", "causal_conv1d")
# What transformers 5.24 ends in for a config that makes no sense (heads of 0 channels, an unknown rope_type, a word
# where a number belongs) and for weights that are cut, besides its own explained ValueErrors. There is no common base.
_UNLOADABLE = (
    *(ImportError, OSError, RuntimeError, ValueError),
    *(StrictDataclassError, SafetensorError, pickle.UnpicklingError, EOFError),
    *(ArithmeticError, AssertionError, AttributeError, LookupError, TypeError),
)
# A decoder layer's weights, in a causal LM or in a wrapper's language model; neither vision towers nor `mtp.layers`.
_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")


@dataclass(frozen=True)
class Ends:
    """Both ends of a target, frozen: what a drafter borrows to embed its blocks and to name its tokens."""

    embed: nn.Embedding
    norm: nn.Module
    head: nn.Linear

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.embed.embedding_dim

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table, which may be more than the tokenizer has tokens."""
        return self.embed.num_embeddings

    @property
    def device(self) -> torch.device:
        """Where blocks are embedded."""
        return self.embed.weight.device


@dataclass(frozen=True)
class Outline:
    """A target as its configuration describes it, before any of its weights are there."""

    config: PreTrainedConfig
    """The text model's."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        return int(self.config.vocab_size)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.config.num_hidden_layers)

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


@dataclass(frozen=True)
class Target(Ends):
    """One loaded target; nothing in it takes gradients."""

    model: Pretrained
    """The causal LM, in eval mode."""
    backbone: nn.Module
    """The decoder stack with embedding and final norm: what runs without the head."""
    layers: nn.ModuleList
    config: PreTrainedConfig
    """The text model's config."""
    family: Family

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies."""
        return Outline(self.config).rope_theta

    @property
    def max_positions(self) -> int:
        """Tokens in the target's window."""
        return Outline(self.config).max_positions


def read_outline(folder: Path) -> Outline:
    """The target in a Hugging Face folder as its config.json describes it; InputError where that makes no sense."""
    read_config(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except _UNLOADABLE as error:
        raise _unloadable(folder, error) from error
    return Outline(config.get_text_config())


def load_target(folder: Path, dtype: torch.dtype = torch.float32) -> Target:
    """The target in a Hugging Face folder, frozen; InputError where it has no weights or an unknown shape."""
    declared = read_config(folder)
    log.info("loading the target in %s, as %s", folder, str(dtype).removeprefix("torch."))
    disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except _UNLOADABLE as error:
        raise _unloadable(folder, error) from error
    model, report = loaded
    # transformers fills what a checkpoint lacks with random numbers; such a target would train a drafter for nobody.
    if lacking := sorted(report["missing_keys"]):
        raise InputError(f"{folder} lacks {len(lacking)} of the target's weights, among them {lacking[:3]}")
    refuse_dequantized(str(folder), declared, model)
    target = freeze(model)
    _refuse_unused_layers(folder, target, report["unexpected_keys"])
    unpack(model)
    return target


def _unloadable(folder: Path, error: Exception) -> InputError:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return InputError(
        f"{folder} cannot be loaded as a causal language model ({reason}): look at its config.json, or fetch its "
        "files again"
    )


def _refuse_unused_layers(folder: Path, target: Target, unused: Iterable[str]) -> None:
    """InputError where the weights hold decoder layers beyond those that the config counts: another model's.

    Layers that draft (`num_nextn_predict_layers`) may stand behind the last one, and are dropped rightly.
    """
    behind = target.num_layers + int(target.config.to_dict().get("num_nextn_predict_layers") or 0)
    layers = {int(match[1]) for match in map(_LAYER.match, unused) if match}
    if beyond := sorted(layer for layer in layers if layer >= behind):
        raise InputError(
            f"{folder} holds weights of decoder layer {beyond[-1]}, but its config.json counts {target.num_layers} "
            "layers: it is not the model that was saved; set num_hidden_layers right, or fetch its files again"
        )


def freeze(model: Pretrained) -> Target:
    """The target around a loaded model, which is put into eval mode and takes no gradients from now on."""
    model.eval().requires_grad_(False)
    parts = find_parts(model)
    borrowed = {"lm_head": parts.head, "embedding": parts.embed, "final norm": parts.norm}
    refuse_quantized_parts(type(model).__name__, borrowed)
    return Target(
        model=model,
        backbone=parts.backbone,
        layers=parts.layers,
        embed=parts.embed,
        head=parts.head,
        norm=parts.norm,
        config=model.config.get_text_config(),
        family=parts.family,
    )


def refuse_unfit_hybrid(target: Target, device: torch.device, packages: Sequence[str] = HYBRID_PACKAGES) -> None:
    """InputError where a target with linear attention would run its reference loop on CUDA, or cannot run its kernels.

    Those of flash-linear-attention assert that nothing is float32 (`fla/ops/gated_delta_rule/chunk.py`).
    """
    if device.type != "cuda" or "linear_attention" not in (target.config.to_dict().get("layer_types") or ()):
        return
    name = type(target.model).__name__
    if lacking := [package for package in packages if find_spec(package) is None]:
        raise InputError(
            f"{name} has linear attention, and {', '.join(lacking)} cannot be imported: transformers would fall back "
            "to a loop many times slower; install flash-linear-attention and causal-conv1d"
        )
    if target.embed.weight.dtype == torch.float32:
        raise InputError(
            f"{name} has linear attention, whose CUDA kernels (flash-linear-attention) take no float32: give "
            "--compute-dtype bfloat16"
        )
