"""Where a target lies: on one device or spread over several, and what a drafter borrows of it on one.

Decoder layers lie in contiguous runs of near-equal size, in order; all that comes before them on the first device,
final norm and head on the last. A head that is the embedding itself stays where that is. accelerate's hooks bring what
goes into a module to its weights, so that the model is called as before. What comes out of a layer is on that layer's
device, and `taps.py` brings it to the first.
"""

from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_module
from torch import nn

from draftmill.contracts.errors import RecipeError
from draftmill.extract.quantized import refuse_spreading
from draftmill.extract.target import Ends, Target

Part = TypeVar("Part", bound=nn.Module)


def device_kind(named: str) -> str:
    """cpu or cuda, as `named`, or for `auto` as there is; RecipeError where CUDA is wanted and torch finds none."""
    found = torch.cuda.is_available()
    if named == "cuda" and not found:
        raise RecipeError(
            "--device cuda: torch finds no CUDA device here (look at nvidia-smi and at the build of torch); leave "
            "--device at auto to work on the CPU"
        )
    return ("cuda" if found else "cpu") if named == "auto" else named


def first_devices(kind: str, count: int) -> tuple[torch.device, ...]:
    """The first `count` devices of a kind, which a target is spread over; RecipeError where there are fewer."""
    num_found = torch.cuda.device_count() if kind == "cuda" else 0
    if count > max(num_found, 1):
        raise RecipeError(
            f"--target-gpus {count}: torch finds {num_found or 'no'} CUDA device{'s' * (num_found > 1)} here to spread "
            f"a target over; set --target-gpus {max(num_found, 1)}{'' if num_found else ' to work on the CPU'}"
        )
    return tuple(torch.device("cuda", i) for i in range(count)) if num_found else (torch.device("cpu"),)


def place(target: Target, devices: Sequence[torch.device]) -> None:
    """Moves a target to a device, or spreads it over several; an error where it cannot be spread over so many."""
    if len(devices) == 1:
        nn.Module.to(target.model, devices[0])
    else:
        spread(target, [str(device) for device in devices])


def spread(target: Target, places: Sequence[str], offload_dir: Path | None = None) -> None:
    """Spreads a target over devices by name; a place called `disk` keeps its weights in `offload_dir` between calls.

    RecipeError where places are more than layers, InputError where weights are quantized.
    """
    refuse_spreading(type(target.model).__name__, target.model)
    dispatch_model(
        target.model,
        device_map(target, places),
        main_device=places[0],  # pyright: ignore[reportArgumentType]  # names will do
        offload_dir=offload_dir,
        # A key-value cache lies with the layers, and is not brought along from one to the next.
        skip_keys=target.model._skip_keys_device_placement,
    )


def device_map(target: Target, places: Sequence[str]) -> dict[str, str | int | torch.device]:
    """The place of every module, by the largest modules' names that lie in one place whole.

    The decoder stack itself is not among them: a hook on it would call all of its layers for `taps.py`'s shorter copy.
    """
    names = {module: name for name, module in target.model.named_modules()}
    is_tied = target.head.weight is target.embed.weight
    named = {names[target.norm]: places[-1], names[target.head]: places[0] if is_tied else places[-1]}
    for where, run in zip(places, layer_runs(target.num_layers, len(places)), strict=True):
        named |= {names[target.layers[i]]: where for i in run}
    return {**dict.fromkeys(_others(target.model, named), places[0]), **named}


def layer_runs(num_layers: int, num_places: int) -> list[range]:
    """Which layers each place takes; the first, which has embedding and drafter too, never more than another."""
    if num_places > num_layers:
        raise RecipeError(
            f"--target-gpus {num_places}: the target has {num_layers} layers, and every device takes at least one of "
            "them; lower --target-gpus"
        )
    ends = [i * num_layers // num_places for i in range(num_places + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def _others(module: nn.Module, named: Collection[str], prefix: str = "") -> Iterator[str]:
    """The largest modules below `module` that none of the named ones is in, or is."""
    for name, child in module.named_children():
        path = prefix + name
        if any(other.startswith(f"{path}.") for other in named):
            yield from _others(child, named, f"{path}.")
        elif path not in named:
            yield path


def ends_on(ends: Ends, device: torch.device) -> Ends:
    """The ends on one device: what lies there is lent as it is, the rest is copied; tied ones stay one matrix."""
    found = Ends(_part_on(ends.embed, device), _part_on(ends.norm, device), _part_on(ends.head, device))
    if ends.head.weight is ends.embed.weight:
        found.head.weight = found.embed.weight
    return found


def _part_on(part: Part, device: torch.device) -> Part:
    if next(part.parameters()).device == device:
        return part
    copied = deepcopy(part)
    # The hook of a spread target would bring everything back to where the part was.
    remove_hook_from_module(copied)
    return copied.to(device)
