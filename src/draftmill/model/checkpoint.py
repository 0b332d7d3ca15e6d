"""A drafter as files: `config.json` and `model.safetensors` in the z-lab layout, read back strictly."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from draftmill.contracts.errors import InputError
from draftmill.model.drafter import Drafter
from draftmill.model.shape import DrafterShape
from draftmill.storage.cache import write_atomically
from draftmill.storage.checkpoints import CONFIG_FILE, WEIGHTS_FILE


def drafter_files(drafter: Drafter, dtype: torch.dtype | None = None) -> dict[str, bytes]:
    """The files of a drafter by name; `dtype` None keeps the parameters' own."""
    tensors = {name: tensor.detach().cpu().to(dtype or tensor.dtype).contiguous() for name, tensor in _state(drafter)}
    config = drafter.shape.to_config() | {"dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch.")}
    return {
        CONFIG_FILE: json.dumps(config, indent=2, sort_keys=True).encode() + b"\n",
        WEIGHTS_FILE: save(tensors, metadata={"format": "pt"}),
    }


def _state(drafter: Drafter) -> list[tuple[str, torch.Tensor]]:
    return list(drafter.state_dict().items())


def save_drafter(folder: Path, drafter: Drafter, dtype: torch.dtype | None = None) -> None:
    """Writes the drafter's files into `folder`, which is made where it is missing."""
    for name, data in drafter_files(drafter, dtype).items():
        write_atomically(folder / name, data)


def copy_of(drafter: Drafter, dtype: torch.dtype) -> Drafter:
    """A drafter of the same weights in `dtype`, in memory of its own; it takes no gradients."""
    with torch.device("meta"):
        twin = Drafter(drafter.shape)
    weights = {name: tensor.detach().to(dtype, copy=True) for name, tensor in _state(drafter)}
    twin.load_state_dict(weights, assign=True)
    return twin.eval().requires_grad_(False)


def load_drafter(folder: Path) -> Drafter:
    """The drafter in `folder`, in the dtype of its file; InputError naming what is missing, unknown or misshapen."""
    config_file, weights_file = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    for file in (config_file, weights_file):
        if not file.is_file():
            raise InputError(f"{folder} holds no {file.name}: it is not a drafter's folder")
    try:
        shape = DrafterShape.from_config(json.loads(config_file.read_bytes()), str(config_file))
        tensors = load_file(weights_file)
    except json.JSONDecodeError as error:
        raise InputError(f"{config_file} is not JSON: {error}") from error
    except SafetensorError as error:
        raise InputError(f"{weights_file} cannot be read: {error}") from error
    with torch.device("meta"):
        drafter = Drafter(shape)
    _check_tensors({name: tensor.shape for name, tensor in _state(drafter)}, tensors, weights_file)
    drafter.load_state_dict(tensors, assign=True)
    return drafter.eval()


def _check_tensors(wanted: dict[str, torch.Size], found: dict[str, torch.Tensor], file: Path) -> None:
    wrong = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    wrong += [f"{name} is not a drafter's" for name in found.keys() - wanted.keys()]
    wrong += [
        f"{name} is {list(found[name].shape)} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    if wrong:
        raise InputError(f"{file} does not fit its {CONFIG_FILE}: {'; '.join(sorted(wrong))}")
