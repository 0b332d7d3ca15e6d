"""How large a drafter is and what a training step of it costs, from its shape alone.

Forward and backward of a weight are three products of two operations each: the output, the input's gradient and the
weight's own. `fc` needs no input gradient (features are data), the frozen head needs no weight gradient.
Follows DFlash (arXiv 2602.06036); all layers full attention.
"""

from dataclasses import dataclass

from draftmill.estimate.target import FLOP_PER_KEY_CHANNEL

FLOP_PER_WEIGHT = 6
FLOP_PER_HALF_TRAINED_WEIGHT = 4
BFLOAT16_BYTES = 2
# float32 master, two AdamW moments, and the working weights in bfloat16; gradients come on top.
STATE_BYTES_PER_WEIGHT = 4 + 8 + 2
GRADIENT_BYTES = (2, 4)


@dataclass(frozen=True, kw_only=True)
class DrafterSize:
    """A drafter's shape as far as cost goes."""

    hidden_size: int
    num_layers: int
    num_taps: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int

    @property
    def num_tensors(self) -> int:
        """Tensors in the checkpoint: eleven a layer, fc, hidden_norm and norm."""
        return 11 * self.num_layers + 3

    @property
    def num_parameters(self) -> int:
        """Trained weights."""
        norms = 2 * self.hidden_size + 2 * self.head_dim
        layer = self._query_weights + self._key_value_weights + norms
        return self.num_layers * layer + self._fc_weights + 2 * self.hidden_size

    @property
    def feature_bytes(self) -> int:
        """Bytes in bfloat16 of one token's features."""
        return self.num_taps * self.hidden_size * BFLOAT16_BYTES

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes of weights, masters, moments and gradients: with bfloat16 and with float32 gradients."""
        low, high = (self.num_parameters * (STATE_BYTES_PER_WEIGHT + gradient) for gradient in GRADIENT_BYTES)
        return low, high

    def context_flop(self) -> float:
        """Operations, forward and backward, for one context token: fc, and keys and values in every layer."""
        projected = self.num_layers * self._key_value_weights
        return FLOP_PER_HALF_TRAINED_WEIGHT * self._fc_weights + FLOP_PER_WEIGHT * projected

    def slot_flop(self, context: float, head_weights: int) -> float:
        """Operations, forward and backward, for one block slot that sees `context` context tokens; slot 0 of a
        block never reaches the head."""
        body = FLOP_PER_WEIGHT * self.num_layers * (self._query_weights + self._key_value_weights)
        keys = context + self.block_size
        attention = 3 * FLOP_PER_KEY_CHANNEL * self.num_layers * self.num_heads * self.head_dim * keys
        head = FLOP_PER_HALF_TRAINED_WEIGHT * head_weights * (self.block_size - 1) / self.block_size
        return body + attention + head

    @property
    def _fc_weights(self) -> int:
        return self.num_taps * self.hidden_size**2

    @property
    def _key_value_weights(self) -> int:
        """Per layer: what a context token meets too."""
        return 2 * self.hidden_size * self.num_kv_heads * self.head_dim

    @property
    def _query_weights(self) -> int:
        """Per layer: what only block slots meet."""
        return self.hidden_size * (2 * self.num_heads * self.head_dim + 3 * self.intermediate_size)
