"""Where kinds of drafter differ: what stands between the trunk's hidden states and the target's frozen head.

    trunk   features and blocks -> a hidden state for every drafted slot      one for all kinds
    head    hidden states -> a loss in training, tokens in decoding           of the kind

Plain DFlash has an empty head: every slot for itself through the target's head. Others look at the token before a slot:
DSpark's Markov head adds a low-rank bias by it, DFlash 2's selector scores transitions between candidates (and its
convolutions sit in the layers). A kind is known by the architecture that `config.json` names; adding one is a
`HeadKind`, registered, and neither trunk nor loop nor export changes. J = B - 1 drafted slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor, nn

from draftmill.contracts.errors import InputError
from draftmill.model.layers import DrafterLayer
from draftmill.model.loss import BlockLoss, LossRule, Truth, block_loss
from draftmill.model.shape import PLAIN_ARCHITECTURE, DrafterShape


@dataclass(frozen=True)
class Drafts:
    """Tokens chosen for the slots of some blocks."""

    token_ids_NJ: Int[Tensor, "N J"]
    gaps_NJ: Float[Tensor, "N J"]
    """How far the second best logit lay behind the best: near 0, rounding decides."""


@runtime_checkable
class Head(Protocol):
    """A module whose parameters, where it has any, are trained and saved with the trunk's."""

    def loss(
        self, hidden_NJH: Float[Tensor, "N J H"], truth: Truth, head_VH: Float[Tensor, "V H"], rule: LossRule
    ) -> BlockLoss:
        """What the slots' hidden states cost; `head_VH` is the target's frozen head, or the rows of it that count."""
        ...

    def draft(
        self, hidden_NJH: Float[Tensor, "N J H"], anchor_ids_N: Int[Tensor, "N"], target_head: nn.Module
    ) -> Drafts:
        """The greedy drafts of blocks whose anchors hold these tokens."""
        ...


def likeliest(logits: Float[Tensor, "... V"]) -> tuple[Int[Tensor, "..."], Float[Tensor, "..."]]:
    """The most likely token everywhere (the first of equals, as argmax has it), and how far the second lies behind."""
    top = logits.float().topk(2, dim=-1).values
    return logits.argmax(-1), top[..., 0] - top[..., 1]


class PlainHead(nn.Module):
    """Nothing of its own: every slot for itself, through the target's head."""

    def loss(
        self, hidden_NJH: Float[Tensor, "N J H"], truth: Truth, head_VH: Float[Tensor, "V H"], rule: LossRule
    ) -> BlockLoss:
        return block_loss(hidden_NJH, truth, head_VH, rule)

    def draft(
        self, hidden_NJH: Float[Tensor, "N J H"], anchor_ids_N: Int[Tensor, "N"], target_head: nn.Module
    ) -> Drafts:
        ids, gaps = likeliest(target_head(hidden_NJH.flatten(0, 1)))
        shape = hidden_NJH.shape[:2]
        return Drafts(ids.unflatten(0, shape), gaps.unflatten(0, shape))


Sizes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class HeadKind:
    """One kind of drafter, as far as it differs from others."""

    architecture: str
    """What its `config.json` names first under `architectures`; engines choose their code by it."""
    make_head: Callable[[DrafterShape], Head]
    prefix: str
    """What the names of the head's tensors begin with in files, `markov_head.` for example."""
    sizes: Callable[[DrafterShape], Sizes]
    """Names (as in files) and sizes of all tensors beyond the plain trunk's, written down apart from the network."""
    make_layer: Callable[[DrafterShape, int], DrafterLayer] = DrafterLayer
    """A layer of the trunk; a kind that puts modules of its own around its sublayers derives from it."""


def _no_sizes(_shape: DrafterShape) -> Sizes:
    return {}


_KINDS = {PLAIN_ARCHITECTURE: HeadKind(PLAIN_ARCHITECTURE, lambda _: PlainHead(), prefix="", sizes=_no_sizes)}


def register(kind: HeadKind) -> None:
    """Makes a kind of drafter known under its architecture."""
    assert _KINDS.setdefault(kind.architecture, kind) is kind, f"{kind.architecture} is taken"


def head_kind(architecture: str) -> HeadKind:
    """The kind of an architecture; InputError naming those that are known."""
    if architecture not in _KINDS:
        raise InputError(f"architecture {architecture} is no drafter that draftmill knows: {', '.join(sorted(_KINDS))}")
    return _KINDS[architecture]
