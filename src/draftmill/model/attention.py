"""How blocks attend to the context and to themselves: what every form of attention is, and the dense reference.

All take queries [A, Q, C] and keys and values [A', S, C] (A a multiple of A', context keys first) and follow the rule
of `contracts/blocks.py`.
"""

from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from draftmill.model.mask import BlockLayout, dense_mask


@runtime_checkable
class Attend(Protocol):
    """Attention over one row; `window` is None on full attention layers."""

    def __call__(
        self,
        queries: Float[Tensor, "A Q C"],
        keys: Float[Tensor, "A2 S C"],
        values: Float[Tensor, "A2 S C"],
        window: int | None,
    ) -> Float[Tensor, "A Q C"]: ...


def masked_attention(
    queries: Float[Tensor, "A Q C"],
    keys: Float[Tensor, "A2 S C"],
    values: Float[Tensor, "A2 S C"],
    mask: Bool[Tensor, "Q S"] | None,
) -> Float[Tensor, "A Q C"]:
    """Grouped-query softmax attention; query head h reads key-value head h // (A / A')."""
    times = len(queries) // len(keys)
    attended = F.scaled_dot_product_attention(
        queries.unflatten(0, (len(keys), times)),
        keys[:, None].expand(-1, times, -1, -1),
        values[:, None].expand(-1, times, -1, -1),
        attn_mask=mask,
    )
    return attended.flatten(0, 1)


class DenseAttention:
    """One call over every key under the full mask: the reference the grouped form is tested against."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout

    def __call__(
        self,
        queries: Float[Tensor, "A Q C"],
        keys: Float[Tensor, "A2 S C"],
        values: Float[Tensor, "A2 S C"],
        window: int | None,
    ) -> Float[Tensor, "A Q C"]:
        return masked_attention(queries, keys, values, dense_mask(self._layout, window))
