"""Rotary positions, half-split over the full head_dim as in Qwen3; tables and rotation stay float32 in any dtype.

Frequencies are formed as transformers forms them, so that tables are equal bit for bit: engines load what it computes.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

RopeTable = tuple[Float[Tensor, "S C"], Float[Tensor, "S C"]]


def rope_table(positions_S: Int[Tensor, "S"], head_dim: int, theta: float) -> RopeTable:
    """cos and sin of every position, float32; channel c and c + head_dim / 2 turn by the same angle."""
    # On the host: other devices' powers differ in the last bit.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = positions_S[:, None].float() * (1.0 / (theta**exponents)).to(positions_S.device)
    angles_SC = torch.cat([angles, angles], dim=-1)
    return angles_SC.cos(), angles_SC.sin()


def rotate(states_ASC: Float[Tensor, "A S C"], table: RopeTable) -> Float[Tensor, "A S C"]:
    """The states turned to their positions, in their own dtype."""
    cos_SC, sin_SC = table
    full = states_ASC.float()
    low, high = full.chunk(2, dim=-1)
    return (full * cos_SC + torch.cat([-high, low], dim=-1) * sin_SC).to(states_ASC.dtype)
