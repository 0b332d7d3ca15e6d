"""Features: the residual stream right after each tapped layer, read by forward hooks.

Tap id `i` gives Hugging Face's `hidden_states[i + 1]`, bit for bit. Features of K taps are concatenated in id order:
`[R, T, K*H]` in the target's dtype. Follows DFlash (arXiv 2602.06036, section 4.1). Where the target's own
distribution is learnt from, the last layer's output is read too, before the final norm: that norm is the target's own
module (Qwen3.5's multiplies by 1 + its weight) and is applied only where the head is.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from draftmill.contracts.errors import InputError
from draftmill.contracts.taps import check_tap_ids
from draftmill.extract.target import Target

# Features that vary by less than this share of their size are the rounding noise of one constant.
CONSTANT_FRAC = 1e-4


@dataclass
class Captured:
    """What the hooks saw during one forward pass of the target."""

    tap_ids: tuple[int, ...]
    last_id: int | None = None
    """The last layer, where its output is wanted too."""
    device: torch.device | None = None
    """Where everything seen is brought, for layers may lie on several devices; None: it stays where its layer is."""
    _seen: dict[int, list[Tensor]] = field(default_factory=dict)

    def _take(self, tap_id: int, _module: nn.Module, _args: tuple[Any, ...], output: Tensor | tuple[Any, ...]) -> None:
        """The hook: a layer gives its hidden states bare or first in a tuple."""
        hidden_RTH = output if isinstance(output, Tensor) else output[0]
        # Copied: a later layer may write into the same memory. Detached: the target is never learnt from.
        self._seen.setdefault(tap_id, []).append(hidden_RTH.detach().to(self.device, copy=True))

    def features(self) -> Float[Tensor, "R T KH"]:
        """The features of the pass; an AssertionError where a hook did not fire exactly once."""
        return torch.cat([self._once(tap_id) for tap_id in self.tap_ids], dim=-1)

    def last(self) -> Float[Tensor, "R T H"] | None:
        """The last layer's output, before the final norm; None where it was not asked for."""
        return None if self.last_id is None else self._once(self.last_id)

    def _once(self, layer_id: int) -> Float[Tensor, "R T H"]:
        seen = self._seen.get(layer_id, [])
        assert len(seen) == 1, f"each hook fires once in a forward pass; layer {layer_id}'s fired {len(seen)} times"
        return seen[0]


@dataclass(frozen=True)
class States:
    """What is read of right-padded rows; zero in the padding."""

    features_RTF: Float[Tensor, "R T KH"]
    last_RTH: Float[Tensor, "R T H"] | None


@runtime_checkable
class Extractor(Protocol):
    """Where hidden states come from: a target in this process, or an engine elsewhere."""

    def read_states(self, input_ids_RT: Int[Tensor, "R T"], lengths_R: Int[Tensor, "R"]) -> States:
        """The states of right-padded rows: one document a row, `lengths_R` tokens of it."""
        ...


class TapReader:
    """Reads features of `target` at `tap_ids` (distinct, ascending, never the last layer)."""

    def __init__(self, target: Target, tap_ids: Sequence[int], *, has_last: bool = False) -> None:
        """`has_last`: the last layer's output is read beside the features."""
        self.target = target
        self.tap_ids = check_tap_ids(tap_ids, target.num_layers)
        self.has_last = has_last
        # Layers that nothing read depends on are not run.
        self._trunk = _trunk(target, target.num_layers if has_last else self.tap_ids[-1] + 1)

    def read(self, input_ids_RT: Int[Tensor, "R T"], lengths_R: Int[Tensor, "R"]) -> Float[Tensor, "R T KH"]:
        """Features of right-padded rows: one document a row, `lengths_R` tokens of it; zero in the padding."""
        return self.read_states(input_ids_RT, lengths_R).features_RTF

    def read_states(self, input_ids_RT: Int[Tensor, "R T"], lengths_R: Int[Tensor, "R"]) -> States:
        """Features, and the last layer's output where it is wanted.

        Runs the layers up to the last one read: no head, no cache. No mask either: attention is causal and padding
        lies on the right, so no token of a document sees it.
        """
        read = self.read_row(input_ids_RT, None)
        is_padding_RT = torch.arange(input_ids_RT.shape[1], device=lengths_R.device) >= lengths_R[:, None]
        is_padding_RT1 = is_padding_RT[:, :, None].to(read.features_RTF.device)
        read.features_RTF.masked_fill_(is_padding_RT1, 0.0)
        if read.last_RTH is not None:
            read.last_RTH.masked_fill_(is_padding_RT1, 0.0)
        return read

    def read_row(self, input_ids_RT: Int[Tensor, "R T"], positions_RT: Int[Tensor, "R T"] | None) -> States:
        """What one pass over whole rows gives at every token; positions None: every row is one document."""
        with torch.no_grad(), self.capturing() as captured:
            self._trunk(input_ids=input_ids_RT, position_ids=positions_RT, use_cache=False)
        return States(captured.features(), captured.last())

    @contextmanager
    def capturing(self) -> Iterator[Captured]:
        """Hooks for one forward pass of the target, cached or not, made by the caller inside the `with`."""
        last_id = self.target.num_layers - 1 if self.has_last else None
        captured = Captured(self.tap_ids, last_id, self.target.device)
        read = (*self.tap_ids, *([] if last_id is None else [last_id]))
        hooks = [self.target.layers[i].register_forward_hook(partial(captured._take, i)) for i in read]
        try:
            yield captured
        finally:
            for hook in hooks:
                hook.remove()


def _trunk(target: Target, num_layers: int) -> nn.Module:
    """The backbone with its first layers only; every module in it is the target's own, and the target is unchanged."""
    # What moves inputs between the devices of a spread target sits on its layers, never here: it would call them all.
    assert "forward" not in vars(target.backbone), f"{type(target.backbone).__name__}'s forward is another's"
    trunk = copy(target.backbone)
    trunk._modules = {**target.backbone._modules, "layers": target.layers[:num_layers]}
    return trunk


def check_taps(reader: TapReader, input_ids_RT: Int[Tensor, "R T"]) -> None:
    """Compares features with the target's own hidden states, once before any work; InputError where they differ.

    The ids should be of several kinds: features that hardly change between them are refused too.
    """
    lengths_R = torch.full((len(input_ids_RT),), input_ids_RT.shape[1], device=input_ids_RT.device)
    with torch.no_grad():
        states = reader.target.backbone(input_ids=input_ids_RT, use_cache=False, output_hidden_states=True)
    per_tap = reader.read(input_ids_RT, lengths_R).chunk(len(reader.tap_ids), dim=-1)
    name = type(reader.target.model).__name__
    for tap_id, feature_RTH in zip(reader.tap_ids, per_tap, strict=True):
        if not feature_RTH.isfinite().all():  # first: a NaN equals nothing
            raise InputError(f"{name}: tap {tap_id} holds numbers that are not finite; load it in a wider dtype")
        if not torch.equal(feature_RTH, states.hidden_states[tap_id + 1].to(feature_RTH.device)):
            raise InputError(f"{name}: tap {tap_id} is not hidden_states[{tap_id + 1}]; its layers lie elsewhere")
        if feature_RTH.flatten(0, 1).std(dim=0).max() <= CONSTANT_FRAC * feature_RTH.abs().max():
            raise InputError(f"{name}: tap {tap_id} is the same at every position; the weights were not loaded")
