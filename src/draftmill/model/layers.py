"""One layer of the trunk: Qwen3's, over a context that is read and never changed.

Parameter names are those of the z-lab checkpoints. Follows DFlash (arXiv 2602.06036, section 4).
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from draftmill.model.attention import Attend, masked_attention
from draftmill.model.cache import DraftCache, decoding_mask
from draftmill.model.rope import RopeTable, rotate
from draftmill.model.shape import DrafterShape


class RmsNorm(nn.Module):
    """RMSNorm with a gain, computed in float32 and returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Float[Tensor, "... H"]) -> Float[Tensor, "... H"]:
        return F.rms_norm(states.float(), self.weight.shape, self.weight.float(), self.eps).to(states.dtype)


class BlockAttention(nn.Module):
    """Projections around attention: queries from the block stream, keys and values from context and block alike."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps)

    def queries(self, states: Float[Tensor, "Q H"], table: RopeTable) -> Float[Tensor, "A Q C"]:
        """Queries of the block stream, normed per head and turned to their positions."""
        return rotate(self.q_norm(self._heads(self.q_proj(states))), table)

    def keys_values(
        self, states: Float[Tensor, "S H"], table: RopeTable
    ) -> tuple[Float[Tensor, "A2 S C"], Float[Tensor, "A2 S C"]]:
        """Keys (normed per head, turned to their positions) and values of context or block states."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(states))), table)
        return keys, self._heads(self.v_proj(states))

    def output(self, attended: Float[Tensor, "A Q C"]) -> Float[Tensor, "Q H"]:
        """The heads' outputs, joined and projected back."""
        return self.o_proj(attended.transpose(0, 1).flatten(1))

    def _heads(self, states: Float[Tensor, "S AC"]) -> Float[Tensor, "A S C"]:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, states: Float[Tensor, "Q H"]) -> Float[Tensor, "Q H"]:
        return self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))


class DrafterLayer(nn.Module):
    """One pre-norm layer; the context passes through no layer norm, it is normed once by the drafter."""

    def __init__(self, shape: DrafterShape, index: int) -> None:
        super().__init__()
        self.window = shape.windows[index]
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = BlockAttention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(
        self, blocks: Float[Tensor, "Q H"], context: Float[Tensor, "T H"], table: RopeTable, attend: Attend
    ) -> Float[Tensor, "Q H"]:
        """The training layout: all blocks of a row at once, under `attend`'s mask."""
        normed = self.input_layernorm(blocks)
        keys, values = self.self_attn.keys_values(torch.cat([context.to(normed.dtype), normed]), table)
        queries = self.self_attn.queries(normed, (table[0][len(context) :], table[1][len(context) :]))
        return self._finish(blocks, attend(queries, keys, values, self.window))

    def draft(
        self, block: Float[Tensor, "B H"], cache: DraftCache, index: int, table: RopeTable
    ) -> Float[Tensor, "B H"]:
        """Decoding: one block over the context in the cache, which is left as it was."""
        normed = self.input_layernorm(block)
        keys, values = self.self_attn.keys_values(normed, table)
        past_keys, past_values = cache.layers[index]
        attended = masked_attention(
            self.self_attn.queries(normed, table),
            torch.cat([past_keys, keys], dim=1),
            torch.cat([past_values, values], dim=1),
            decoding_mask(cache.length, len(block), self.window, block.device),
        )
        return self._finish(block, attended)

    def _finish(self, blocks: Float[Tensor, "Q H"], attended: Float[Tensor, "A Q C"]) -> Float[Tensor, "Q H"]:
        blocks = blocks + self.self_attn.output(attended)
        return blocks + self.mlp(self.post_attention_layernorm(blocks))
