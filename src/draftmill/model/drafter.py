"""The drafter: target features become a context once, blocks of [anchor, MASK, ...] read it through L Qwen3 layers.

    C = RMSNorm(F @ fc^T)               once for all layers; keys and values only
    X = the target's embedding of the block tokens
    each layer: X attends to [C ; X] under the block rule, then SwiGLU; X alone is normed before the layer
    out: norm(X), from which the head (`heads.py`) makes a loss or drafts by the target's own frozen head

All but the head is the trunk, the same for every kind of drafter. Parameter names are those of the z-lab checkpoints.
Embedding and frozen head are the target's and live outside. Follows DFlash (arXiv 2602.06036, section 4).
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from draftmill.model.attention import Attend
from draftmill.model.cache import DraftCache
from draftmill.model.heads import Head, head_kind
from draftmill.model.layers import DrafterLayer, RmsNorm
from draftmill.model.mask import BlockLayout
from draftmill.model.rope import RopeTable, rope_table
from draftmill.model.shape import DrafterShape


class Drafter(nn.Module):
    """The trained part: the trunk (fc, hidden_norm, layers, norm) and the head of its kind."""

    head: Head

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        kind = head_kind(shape.architecture)
        self.shape = shape
        self.fc = nn.Linear(shape.num_taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(kind.make_layer(shape, index) for index in range(shape.num_layers))
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.head = kind.make_head(shape)

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
