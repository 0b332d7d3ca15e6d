"""The z-lab layout: which tensors a drafter's file holds, and a check of the written folder that believes nothing.

Every tensor is read back and compared bit by bit; a missing, foreign or misshapen one is an error with its name.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from draftmill.contracts.errors import InputError
from draftmill.export.engines import check_config
from draftmill.model.checkpoint import drafter_files, named_tensors
from draftmill.model.drafter import Drafter
from draftmill.model.heads import head_kind
from draftmill.model.shape import DrafterShape
from draftmill.storage.checkpoints import CONFIG_FILE, WEIGHTS_FILE
from draftmill.storage.local import write_atomically

Manifest = dict[str, tuple[int, ...]]


def manifest(shape: DrafterShape) -> Manifest:
    """Names and shapes of all tensors, written down apart from the network: eleven a layer, three, the head's own."""
    hidden, width = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (shape.head_dim,),
        "self_attn.k_norm.weight": (shape.head_dim,),
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
    }
    trunk = {"fc.weight": (hidden, shape.num_taps * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    own = head_kind(shape.architecture).sizes(shape)
    return trunk | own | {f"layers.{i}.{name}": size for i in range(shape.num_layers) for name, size in layer.items()}


def write_layout(folder: Path, drafter: Drafter, dtype: torch.dtype) -> None:
    """Writes config and weights, then reads them back; InputError where they are not the drafter's."""
    for name, data in drafter_files(drafter, dtype).items():
        write_atomically(folder / name, data)
    check_layout(folder, drafter, dtype)


def check_layout(folder: Path, drafter: Drafter, dtype: torch.dtype) -> None:
    """InputError naming the first thing in `folder` that is not `drafter` in `dtype`."""
    check_config(json.loads((folder / CONFIG_FILE).read_bytes()), drafter.shape)
    wanted = manifest(drafter.shape)
    trained = named_tensors(drafter)
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        names = set(file.keys())
        if wrong := sorted(names ^ wanted.keys()):
            raise InputError(f"{folder / WEIGHTS_FILE}: missing or foreign tensors: {', '.join(wrong)}")
        for name, size in wanted.items():
            _check_tensor(name, file.get_tensor(name), trained[name].to(dtype), size)


def _check_tensor(name: str, found: torch.Tensor, trained: torch.Tensor, size: tuple[int, ...]) -> None:
    if tuple(found.shape) != size or found.dtype != trained.dtype:
        raise InputError(f"{name} is {list(found.shape)} {found.dtype}; {list(size)} {trained.dtype} is wanted")
    if not bool(torch.isfinite(found).all()):
        raise InputError(f"{name} holds numbers that are not finite: training broke down before this checkpoint")
    if not torch.equal(found.view(torch.uint8), trained.contiguous().view(torch.uint8)):
        raise InputError(f"{name} was written with other bits than were trained")
