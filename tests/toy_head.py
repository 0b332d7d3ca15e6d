"""A second kind of drafter, for tests: its head looks at the token before a slot, its layers scale what they give."""

import torch
from torch import Tensor, nn

from draftmill.model.heads import Drafts, HeadKind, Sizes, likeliest
from draftmill.model.layers import DrafterLayer
from draftmill.model.loss import BlockLoss, LossRule, Truth, block_loss
from draftmill.model.shape import DrafterShape

ARCHITECTURE = "ToyDraftModel"
RANK_KEY = "before_rank"


class BeforeHead(nn.Module):
    """Adds to a slot's hidden state what a low-rank table says of the token before it."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        rank = int(dict(shape.head_config)[RANK_KEY])
        self.down = nn.Embedding(shape.vocab_size, rank)
        self.up = nn.Linear(rank, shape.hidden_size, bias=False)

    def _with_before(self, hidden: Tensor, before: Tensor) -> Tensor:
        return hidden + self.up(self.down(before))

    def loss(self, hidden_NJH: Tensor, truth: Truth, head_VH: Tensor, rule: LossRule) -> BlockLoss:
        assert truth.before_NJ is not None
        return block_loss(self._with_before(hidden_NJH, truth.before_NJ), truth, head_VH, rule)

    def draft(self, hidden_NJH: Tensor, anchor_ids_N: Tensor, target_head: nn.Module) -> Drafts:
        ids, gaps, before_N = [], [], anchor_ids_N
        for slot in range(hidden_NJH.shape[1]):
            before_N, gap_N = likeliest(target_head(self._with_before(hidden_NJH[:, slot], before_N)))
            ids.append(before_N)
            gaps.append(gap_N)
        return Drafts(torch.stack(ids, dim=1), torch.stack(gaps, dim=1))


class ScaledLayer(DrafterLayer):
    """A layer with a module of its own around the others'."""

    def __init__(self, shape: DrafterShape, index: int) -> None:
        super().__init__(shape, index)
        self.scale = nn.Parameter(torch.ones(shape.hidden_size))

    def _finish(self, blocks: Tensor, attended: Tensor) -> Tensor:
        return super()._finish(blocks, attended) * self.scale


def _sizes(shape: DrafterShape) -> Sizes:
    rank, hidden = int(dict(shape.head_config)[RANK_KEY]), shape.hidden_size
    head = {"before_head.down.weight": (shape.vocab_size, rank), "before_head.up.weight": (hidden, rank)}
    return head | {f"layers.{index}.scale": (hidden,) for index in range(shape.num_layers)}


TOY = HeadKind(ARCHITECTURE, BeforeHead, prefix="before_head.", sizes=_sizes, make_layer=ScaledLayer)
