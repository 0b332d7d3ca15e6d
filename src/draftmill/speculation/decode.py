"""Greedy decoding of one prompt: by the target alone, and losslessly with a drafter before it.

A cycle drafts B - 1 tokens behind the last one (the anchor), lets the target verify the block in one pass, keeps the
leading run that equals the target's own choice and adds the target's next token. The target is put back to what was
kept (`sequence.py`); the drafter's cache never holds a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftmill.contracts.acceptance import num_accepted
from draftmill.contracts.errors import InputError
from draftmill.extract.taps import TapReader
from draftmill.extract.target import Target
from draftmill.model.cache import DraftCache
from draftmill.model.drafter import Drafter
from draftmill.model.heads import likeliest
from draftmill.speculation.sequence import CachedTarget


@dataclass(frozen=True)
class Limits:
    """Where an answer ends: at a stop token, which still belongs to it, or at `max_new_tokens`."""

    stop_ids: frozenset[int]
    max_new_tokens: int
    prefill_tokens: int

    def cut(self, token_ids: Sequence[int]) -> list[int]:
        """The answer's tokens up to and including the first stop token, `max_new_tokens` at most."""
        kept = list(token_ids[: self.max_new_tokens])
        stops = [at for at, token_id in enumerate(kept) if token_id in self.stop_ids]
        return kept[: stops[0] + 1] if stops else kept

    def chunks(self, prompt_ids: Sequence[int]) -> list[Sequence[int]]:
        """The prompt in pieces that the target reads one a pass; a prompt has at least one token."""
        assert prompt_ids
        return [prompt_ids[at : at + self.prefill_tokens] for at in range(0, len(prompt_ids), self.prefill_tokens)]

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """Whether the answer is at its end."""
        return len(token_ids) >= self.max_new_tokens or (bool(token_ids) and token_ids[-1] in self.stop_ids)


@dataclass(frozen=True)
class Choice:
    """Greedy choices at consecutive positions, and how far the second best logit lay behind the best."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]

    def first(self, count: int) -> "Choice":
        """The first `count` of the choices."""
        return Choice(self.token_ids[:count], self.gaps[:count])


@dataclass(frozen=True)
class Speculation:
    """One speculative answer: what each cycle emitted and drafted."""

    token_ids: tuple[int, ...]
    emitted: tuple[int, ...]
    drafts: tuple[Choice, ...]


@dataclass(frozen=True)
class Pair:
    """A drafter and the target it drafts for."""

    target: Target
    drafter: Drafter
    reader: TapReader

    @staticmethod
    def of(target: Target, drafter: Drafter) -> "Pair":
        """The pair, in the target's dtype and where it is; InputError where the drafter was made for another target."""
        shape = drafter.shape
        theirs = (shape.hidden_size, shape.vocab_size, shape.num_target_layers)
        ours = (target.hidden_size, target.vocab_size, target.num_layers)
        if theirs != ours:
            raise InputError(
                f"this drafter was trained for a target of (hidden size, vocabulary, layers) {theirs}, "
                f"but the target given has {ours}: name the target it was trained with"
            )
        drafter = drafter.to(target.device, target.embed.weight.dtype)
        return Pair(target, drafter, TapReader(target, shape.tap_ids))

    def block_ids(self, anchors_N: Int[Tensor, "N"]) -> Int[Tensor, "N B"]:
        """Blocks as the drafter is given them: the anchor's token, then MASK."""
        shape = self.drafter.shape
        block_ids_NB = torch.full((len(anchors_N), shape.block_size), shape.mask_id, device=anchors_N.device)
        block_ids_NB[:, 0] = anchors_N
        return block_ids_NB

    def drafts(self, hidden_NJH: Float[Tensor, "N J H"], anchors_N: Int[Tensor, "N"]) -> list[Choice]:
        """What the drafter's head makes of the slots of some blocks whose anchors hold these tokens."""
        drafts = self.drafter.head.draft(hidden_NJH, anchors_N, self.target.head)
        blocks = zip(drafts.token_ids_NJ.tolist(), drafts.gaps_NJ.tolist(), strict=True)
        return [Choice(tuple(token_ids), tuple(gaps)) for token_ids, gaps in blocks]


def best(logits_QV: Float[Tensor, "Q V"]) -> Choice:
    """The greedy choice at every position; the first of equal logits."""
    ids_Q, gaps_Q = likeliest(logits_QV)
    return Choice(tuple(ids_Q.tolist()), tuple(gaps_Q.tolist()))


@torch.no_grad()
def decode_plainly(target: Target, prompt_ids: Sequence[int], limits: Limits) -> Choice:
    """The target's own greedy answer, one token a pass."""
    sequence = CachedTarget(target)
    chosen = [best(sequence.read(chunk)) for chunk in limits.chunks(prompt_ids)][-1]
    token_ids, gaps = list(chosen.token_ids), list(chosen.gaps)
    while not limits.is_complete(token_ids):
        chosen = best(sequence.read(token_ids[-1:]))
        token_ids.extend(chosen.token_ids)
        gaps.extend(chosen.gaps)
    return Choice(tuple(token_ids), tuple(gaps))


@torch.no_grad()
def decode_speculatively(pair: Pair, prompt_ids: Sequence[int], limits: Limits) -> Speculation:
    """The same answer in fewer passes of the target: draft, verify, keep what is right."""
    sequence, context = CachedTarget(pair.target), DraftCache()
    token_ids, features_TF = _prefill(pair, sequence, prompt_ids, limits)
    emitted, drafts = [], []
    while not limits.is_complete(token_ids):
        draft = _draft(pair, context, features_TF, token_ids[-1])
        block = [token_ids[-1], *draft.token_ids]
        with pair.reader.capturing() as captured:
            truth = best(sequence.propose(block)).token_ids
        room = limits.max_new_tokens - len(token_ids)
        new = limits.cut(truth[: num_accepted(draft.token_ids, truth) + 1])[:room]
        sequence.keep(len(new))
        features_TF = captured.features()[0, : len(new)]
        token_ids += new
        emitted.append(len(new))
        drafts.append(draft)
    return Speculation(tuple(token_ids), tuple(emitted), tuple(drafts))


def _prefill(
    pair: Pair, sequence: CachedTarget, prompt_ids: Sequence[int], limits: Limits
) -> tuple[list[int], Float[Tensor, "T F"]]:
    """The token after the prompt, and the features of the whole prompt, however many passes it took."""
    token_ids, features = [], []
    for chunk in limits.chunks(prompt_ids):
        with pair.reader.capturing() as captured:
            token_ids = list(best(sequence.read(chunk)).token_ids)
        features.append(captured.features()[0])
    return token_ids, torch.cat(features)


def _draft(pair: Pair, context: DraftCache, features_TF: Float[Tensor, "T F"], anchor_id: int) -> Choice:
    anchor_1 = torch.tensor([anchor_id], device=features_TF.device)
    embeds_BH = pair.target.embed(pair.block_ids(anchor_1)[0])
    hidden_BH = pair.drafter.draft(context, features_TF, context.length, embeds_BH)
    return pair.drafts(hidden_BH[None, 1:], anchor_1)[0]
