"""What a drafter remembers while decoding: keys and values of the verified context, per layer, and never a block's.

A block's own keys are used and dropped, so nothing has to be rolled back when the target refuses drafts.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LayerCache = tuple[Float[Tensor, "A2 T C"], Float[Tensor, "A2 T C"]]


class DraftCache:
    """Context keys and values of one sequence; `layers[i]` are layer i's, empty at first."""

    def __init__(self) -> None:
        self.layers: list[LayerCache] = []

    @property
    def length(self) -> int:
        """Context tokens held; the next one stands at this position."""
        return self.layers[0][0].shape[1] if self.layers else 0

    def extend(self, new: list[LayerCache]) -> None:
        """Appends the keys and values of newly verified tokens, one pair a layer."""
        if not self.layers:
            self.layers = new
            return
        self.layers = [
            (torch.cat([keys, new_keys], dim=1), torch.cat([values, new_values], dim=1))
            for (keys, values), (new_keys, new_values) in zip(self.layers, new, strict=True)
        ]


def decoding_mask(
    context_len: int, block_size: int, window: int | None, device: torch.device
) -> Bool[Tensor, "B S"] | None:
    """What a block sees at the end of a context; None where it sees everything (full attention layers)."""
    if window is None:
        return None
    positions_S = torch.arange(context_len + block_size, device=device)
    back_BS = positions_S[context_len:, None] - positions_S
    return (back_BS >= 0) & (back_BS < window)
