"""Which form of attention a device runs: one rule, three forms. The choice is made once, and said.

dense    one call over every key under the full mask     the reference
grouped  consecutive blocks over what they can see       CPU, and any other device
flex     compiled kernels under a block mask             CUDA; wants constant shapes
"""

import logging
from dataclasses import dataclass
from typing import Literal

import torch

from draftmill.contracts.errors import RecipeError
from draftmill.model.attention import Attend, DenseAttention
from draftmill.model.flex import FlexAttention, compiled_kernels
from draftmill.model.grouped import GroupedAttention
from draftmill.model.mask import BlockLayout
from draftmill.model.shape import DrafterShape

log = logging.getLogger(__name__)

FormName = Literal["dense", "grouped", "flex"]


@dataclass(frozen=True)
class AttentionForm:
    """One form of attention for drafters of one shape."""

    name: FormName
    windows: tuple[int | None, ...]
    head_dim: int

    @property
    def wants_constant_shapes(self) -> bool:
        """Whether rows of another length or number of blocks would be compiled anew."""
        return self.name == "flex"

    def over(self, layout: BlockLayout) -> Attend:
        """Attention over one row."""
        if self.name == "dense":
            return DenseAttention(layout)
        if self.name == "grouped":
            return GroupedAttention(layout, self.windows)
        index = layout.anchors_N.device.index
        return FlexAttention(layout, self.windows, compiled_kernels(index or 0, self.head_dim))


def attention_form(wanted: Literal["auto"] | FormName, shape: DrafterShape, device: torch.device) -> AttentionForm:
    """The form asked for, or the one the device likes; RecipeError for flex where it has no backward."""
    name: FormName = ("flex" if device.type == "cuda" else "grouped") if wanted == "auto" else wanted
    if name == "flex" and device.type != "cuda":
        raise RecipeError(f"--attention flex trains on CUDA only, and this run is on {device.type}: leave it at auto")
    log.info("attention: %s, on %s", name, device)
    return AttentionForm(name, shape.windows, shape.head_dim)
