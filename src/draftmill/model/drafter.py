"""The drafter: target features become a context once, blocks of [anchor, MASK, ...] read it through L Qwen3 layers.

    C = RMSNorm(F @ fc^T)               once for all layers; keys and values only
    X = the target's embedding of the block tokens
    each layer: X attends to [C ; X] under the block rule, then SwiGLU; X alone is normed before the layer
    out: norm(X), for the target's own frozen head

Parameter names are those of the z-lab checkpoints. Embedding and head are the target's and live outside. Follows
DFlash (arXiv 2602.06036, section 4).
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from draftmill.model.attention import Attend, masked_attention
from draftmill.model.cache import DraftCache, decoding_mask
from draftmill.model.mask import BlockLayout
from draftmill.model.rope import RopeTable, rope_table, rotate
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
        self.window = shape.window(index)
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


class Drafter(nn.Module):
    """The trained part: fc, hidden_norm, layers, norm."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.num_taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(shape, index) for index in range(shape.num_layers))
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def project(self, features: Float[Tensor, "T KH"]) -> Float[Tensor, "T H"]:
        """Target features (taps side by side, in id order) to the context all layers read: project, then norm."""
        return self.hidden_norm(self.fc(features))

    def forward(
        self, block_embeds: Float[Tensor, "Q H"], context: Float[Tensor, "T H"], layout: BlockLayout, attend: Attend
    ) -> Float[Tensor, "Q H"]:
        """Hidden states of every slot of every block of one row, after the final norm: the training layout."""
        table = rope_table(layout.key_positions_S, self.shape.head_dim, self.shape.rope_theta)
        blocks = block_embeds
        for layer in self.layers:
            blocks = layer(blocks, context, table, attend)
        return self.norm(blocks)

    @torch.no_grad()
    def draft(
        self,
        cache: DraftCache,
        new_features: Float[Tensor, "t KH"],
        first_position: int,
        block_embeds: Float[Tensor, "B H"],
    ) -> Float[Tensor, "B H"]:
        """Hidden states of one block at the end of a growing context: the decoding twin of `forward`.

        `new_features` are those of the tokens verified since the last call, from position `first_position` on; the
        block follows them. Afterwards the cache holds the context and nothing of the block.
        """
        assert first_position == cache.length, "features come once each, in order"
        end = first_position + len(new_features)
        self._extend(cache, new_features, first_position)
        table = self._table(end, len(block_embeds), block_embeds.device)
        block = block_embeds
        for index, layer in enumerate(self._stack()):
            block = layer.draft(block, cache, index, table)
        return self.norm(block)

    def _extend(self, cache: DraftCache, features: Float[Tensor, "t KH"], first_position: int) -> None:
        context = self.project(features)
        table = self._table(first_position, len(features), features.device)
        cache.extend([layer.self_attn.keys_values(context, table) for layer in self._stack()])

    def _stack(self) -> list[DrafterLayer]:
        return [layer for layer in self.layers if isinstance(layer, DrafterLayer)]

    def _table(self, start: int, count: int, device: torch.device) -> RopeTable:
        positions = torch.arange(start, start + count, device=device)
        return rope_table(positions, self.shape.head_dim, self.shape.rope_theta)
