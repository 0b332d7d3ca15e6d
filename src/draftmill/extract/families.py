"""One small adapter per family of targets: where it keeps what a drafter reads or borrows, and what its norms mean.

    family      text model types                        decoder stack             norms multiply by
    Llama       llama, mistral, smollm3, qwen2          model                     weight
    Qwen3       qwen3, qwen3_moe                        model                     weight
    Qwen3.5     qwen3_5_text, qwen3_5_moe_text          model, or                 1 + weight
                (Qwen3.6 is of the same types)          model.language_model in
                                                        the wrapper that sees
    any other   -                                       the first of `BACKBONES`  weight

Mixtures of experts need nothing of their own: features are read after whole layers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftmill.contracts.errors import InputError

# Plain causal LMs first, then language models inside vision-language wrappers.
BACKBONES = ("model", "model.language_model", "language_model.model")
# A norm of ones is its gain but for epsilon; more than this off, and the family's rule for norms is wrong.
_GAIN_ERROR = 1e-3


@dataclass(frozen=True)
class Family:
    """How the targets of one family are laid out."""

    name: str
    model_types: frozenset[str]
    """`model_type` of the text model's config; empty: any."""
    backbones: tuple[str, ...]
    """Paths under which the decoder stack may lie: its layers at `.layers`, its final norm at `.norm`."""
    gain_offset: float
    """What the family's norms add to their weight before they multiply by it."""

    def gain(self, norm: nn.Module) -> Tensor:
        """What a norm of this family multiplies by; InputError where it does something else."""
        weight = dict(norm.named_parameters()).get("weight")
        if weight is None:
            raise InputError(f"{type(norm).__name__} has no weight: it is no norm of the {self.name} family")
        gain = weight.detach().float() + self.gain_offset
        with torch.no_grad():
            error = (norm(torch.ones_like(weight)[None]).float()[0] - gain).abs().max()
        # bfloat16 norms round their gain.
        if error > max(_GAIN_ERROR, float(torch.finfo(weight.dtype).eps) * float(gain.abs().max())):
            raise InputError(
                f"{type(norm).__name__} does not multiply by its weight + {self.gain_offset:g}, as norms of the "
                f"{self.name} family do: add its family to extract/families.py"
            )
        return gain


LLAMA = Family("Llama", frozenset({"llama", "mistral", "smollm3", "qwen2"}), ("model",), 0.0)
QWEN3 = Family("Qwen3", frozenset({"qwen3", "qwen3_moe"}), ("model",), 0.0)
QWEN3_5 = Family(
    "Qwen3.5", frozenset({"qwen3_5_text", "qwen3_5_moe_text"}), ("model", "model.language_model"), gain_offset=1.0
)
OTHER = Family("any other", frozenset(), BACKBONES, 0.0)
FAMILIES = (LLAMA, QWEN3, QWEN3_5, OTHER)


@dataclass(frozen=True)
class Parts:
    """What was found in a model."""

    family: Family
    backbone: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    embed: nn.Embedding
    head: nn.Linear


def find_parts(model: Any) -> Parts:
    """The parts of a causal LM; InputError that lists what was looked for and what is there."""
    model_type = model.config.get_text_config().model_type
    family = next(f for f in FAMILIES if model_type in f.model_types or not f.model_types)
    modules = dict(model.named_modules())
    path = next((path for path in family.backbones if isinstance(modules.get(f"{path}.layers"), nn.ModuleList)), None)
    if path is None or f"{path}.norm" not in modules:
        raise InputError(_not_found(type(model).__name__, model_type, family, modules))
    head, embed = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embed, nn.Embedding):
        raise InputError(
            f"{type(model).__name__}: wanted a linear head and an embedding table, found {type(head).__name__} "
            f"and {type(embed).__name__}"
        )
    if head.bias is not None:
        raise InputError(
            f"{type(model).__name__}: its head adds a bias to the logits, which no drafter does: not supported"
        )
    layers = modules[f"{path}.layers"]
    assert isinstance(layers, nn.ModuleList)
    return Parts(family, modules[path], layers, modules[f"{path}.norm"], embed, head)


def _not_found(name: str, model_type: str, family: Family, modules: dict[str, nn.Module]) -> str:
    lists = sorted(path for path, module in modules.items() if isinstance(module, nn.ModuleList))
    wanted = ", ".join(f"{path}.layers with {path}.norm" for path in family.backbones)
    return (
        f"{name} (model_type {model_type}, family {family.name}) is not a target draftmill knows: looked for a list of "
        f"decoder layers and a norm at {wanted}; its lists of modules lie at {', '.join(lists[:5]) or 'nowhere'}; "
        "add its family to extract/families.py"
    )
