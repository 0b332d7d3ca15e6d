"""A drafter as files: `config.json` and `model.safetensors` in the z-lab layout, read back strictly."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from draftmill.contracts.errors import InputError
from draftmill.model.drafter import Drafter
from draftmill.model.heads import head_kind
from draftmill.model.shape import DrafterShape
from draftmill.storage.checkpoints import CONFIG_FILE, WEIGHTS_FILE
from draftmill.storage.local import write_atomically

# The name of the head inside a `Drafter`.
_HEAD = "head."


def drafter_files(drafter: Drafter, dtype: torch.dtype | None = None) -> dict[str, bytes]:
    """The files of a drafter by name; `dtype` None keeps the parameters' own."""
    tensors = {name: t.detach().cpu().to(dtype or t.dtype).contiguous() for name, t in named_tensors(drafter).items()}
    config = drafter.shape.to_config() | {"dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch.")}
    return {
        CONFIG_FILE: json.dumps(config, indent=2, sort_keys=True).encode() + b"\n",
        WEIGHTS_FILE: save(tensors, metadata={"format": "pt"}),
    }


def named_tensors(drafter: Drafter) -> dict[str, torch.Tensor]:
    """The drafter's tensors under the names its files give them."""
    return {_in_files(name, drafter): tensor for name, tensor in drafter.state_dict().items()}


def take_tensors(drafter: Drafter, tensors: Mapping[str, torch.Tensor], *, assign: bool = False) -> None:
    """Puts tensors named as in files into the drafter; with `assign` they become its parameters, dtype and all."""
    drafter.load_state_dict({name: tensors[_in_files(name, drafter)] for name in drafter.state_dict()}, assign=assign)


def _in_files(name: str, drafter: Drafter) -> str:
    """The name of a tensor in files: a head's begin as its kind has it."""
    prefix = head_kind(drafter.shape.architecture).prefix
    return prefix + name.removeprefix(_HEAD) if name.startswith(_HEAD) else name


def save_drafter(folder: Path, drafter: Drafter, dtype: torch.dtype | None = None) -> None:
    """Writes the drafter's files into `folder`, which is made where it is missing."""
    for name, data in drafter_files(drafter, dtype).items():
        write_atomically(folder / name, data)


def copy_of(drafter: Drafter, dtype: torch.dtype, device: torch.device | None = None) -> Drafter:
    """A drafter of the same weights in `dtype`, in memory of its own; it takes no gradients.

    With a `device` it lies there, and is made there: where the weights are, nothing is allocated.
    """
    with torch.device("meta"):
        twin = Drafter(drafter.shape)
    weights = {
        name: tensor.detach().to(device or tensor.device).to(dtype, copy=True)
        for name, tensor in named_tensors(drafter).items()
    }
    take_tensors(twin, weights, assign=True)
    return twin.eval().requires_grad_(False)


def load_drafter(folder: Path) -> Drafter:
    """The drafter in `folder`, in the dtype of its file; InputError naming what is missing, unknown, misshapen or
    not finite."""
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
    _check_tensors({name: t.shape for name, t in named_tensors(drafter).items()}, tensors, weights_file)
    take_tensors(drafter, tensors, assign=True)
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
    if broken := sorted(name for name in wanted if not found[name].isfinite().all()):
        raise InputError(
            f"{file}: {len(broken)} of {len(found)} tensors are not finite ({', '.join(broken[:3])}): "
            "its training diverged; take an older checkpoint, or train with a lower lr"
        )
