"""The gate before training: is this set this target's, is the mask token free, is there anything to learn.

Samples longer than a row are cut there and counted. Samples that cannot be trained on are dropped and listed: without
an anchor position, or holding the mask token. The set is refused where nothing is left, or where more is dropped than
`max_dropped_frac`.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftmill.chat.chat import Chat
from draftmill.contracts.cards import Dropped, count_reasons, told_reasons
from draftmill.contracts.errors import DataGateError, InputError, RecipeError
from draftmill.settings.train import TrainSettings
from draftmill.storage.models import CONFIG_FILE, text_config
from draftmill.storage.sets import SetReader
from draftmill.train.samples import BoolArray, IntArray, SampleBatch, SampleSet


@dataclass(frozen=True)
class KeptSample:
    """A sample that is trained on: its index in the set, its tokens, and how many of them can be an anchor."""

    index: int
    length: int
    num_eligible: int
    is_cut: bool = False
    """Whether it is longer in the set: what lies beyond `length` tokens is left out."""


@dataclass(frozen=True)
class GatedSamples:
    """What passed the gate, what did not, and the mask token that holds for it."""

    mask_id: int
    kept: tuple[KeptSample, ...]
    dropped: tuple[Dropped, ...]
    seen_ids: tuple[int, ...]
    """Every token that occurs in the set, ascending."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the kept samples, supervised or not."""
        return sum(sample.length for sample in self.kept)

    @property
    def num_cut(self) -> int:
        """Kept samples of which only the beginning is trained on."""
        return sum(sample.is_cut for sample in self.kept)


@dataclass(frozen=True)
class Vocabulary:
    """What the gate must know of a target: rows of its embedding, and ids that can never stand for a mask."""

    num_rows: int
    reserved: frozenset[int]
    tokenizer_ids: frozenset[int]


def vocabulary_of(target: Path, chat: Chat) -> Vocabulary:
    """The vocabulary of the target in a folder, read without loading it; InputError where its size is not told."""
    config = text_config(target)
    if not isinstance(num_rows := config.get("vocab_size"), int):
        raise InputError(f"{target / CONFIG_FILE} says no vocab_size: the rows of the target's embedding are unknown")
    configured = [config.get(key) for key in ("pad_token_id", "eos_token_id", "bos_token_id")]
    listed = [i for value in configured for i in (value if isinstance(value, list) else [value]) if i is not None]
    ids = chat.tokenizer.get_vocab(with_added_tokens=True)
    named = {ids[token] for name, token in chat.special_tokens.items() if name != "mask_token" and token in ids}
    return Vocabulary(num_rows, chat.stop_ids | named | set(listed), frozenset(ids.values()))


def check_tokenizer(reader: SetReader, chat: Chat, target: Path) -> None:
    """InputError where the set was tokenized with another tokenizer than the target's."""
    made_with = reader.card.content["tokenizer_hash"]
    if made_with != chat.tokenizer_hash:
        raise InputError(
            f"{reader.store.url} was tokenized with another tokenizer (sha256 {made_with[:12]}…) than the one in "
            f"{target} ({chat.tokenizer_hash[:12]}…): tokenize it with this one, or name the target it was made for"
        )


def gate(samples: SampleSet, vocabulary: Vocabulary, settings: TrainSettings) -> GatedSamples:
    """The samples to train on; DataGateError or InputError where the set or the mask token will not do."""
    used = _used_ids(samples, vocabulary)
    mask_id = _mask_id(settings.mask_id, vocabulary, used)
    kept: list[KeptSample] = []
    dropped: list[Dropped] = []
    for batch in samples.batches():
        _sort_out(batch, mask_id, settings.max_tokens, kept, dropped)
    _refuse_if_poor(kept, dropped, settings)
    return GatedSamples(mask_id, tuple(kept), tuple(dropped), tuple(np.flatnonzero(used).tolist()))


def _used_ids(samples: SampleSet, vocabulary: Vocabulary) -> BoolArray:
    used = np.zeros(vocabulary.num_rows, dtype=np.bool_)
    for batch in samples.batches():
        low, high = int(batch.input_ids.min()), int(batch.input_ids.max())
        if low < 0 or high >= vocabulary.num_rows:
            raise InputError(
                f"{batch.file} holds token ids {low} … {high}, but the target's embedding has "
                f"{vocabulary.num_rows:,} rows: it was tokenized for another target"
            )
        used[batch.input_ids] = True
    return used


def _mask_id(named: int | None, vocabulary: Vocabulary, used: BoolArray) -> int:
    """The mask token: the recipe's, checked; or the first row that neither tokenizer nor data use, then data alone."""
    if named is not None:
        if named >= vocabulary.num_rows:
            raise RecipeError(f"mask_id {named} lies outside the target's embedding of {vocabulary.num_rows:,} rows")
        if named in vocabulary.reserved:
            raise RecipeError(f"mask_id {named} is the target's pad, eos or bos token: name a row that means nothing")
        return named
    rows = [i for i in np.flatnonzero(~used).tolist() if i not in vocabulary.reserved]
    free = [i for i in rows if i not in vocabulary.tokenizer_ids] or rows
    if not free:
        raise DataGateError("no embedding row is left for a mask token: the data use every one; name one with mask_id")
    return free[0]


def _sort_out(
    batch: SampleBatch, mask_id: int, max_tokens: int, kept: list[KeptSample], dropped: list[Dropped]
) -> None:
    starts, ends = batch.bounds[:-1], np.minimum(batch.bounds[1:], batch.bounds[:-1] + max_tokens)
    eligible = batch.loss_mask.copy()
    eligible[:-1] &= batch.loss_mask[1:]
    eligible[ends[ends > starts] - 1] = False  # a sample's last token has no successor, nor the last before a cut
    num_eligible = _count(eligible, starts, ends)
    num_masks = _count(batch.input_ids == mask_id, starts, ends)
    for i, sample_id in enumerate(batch.ids):
        is_cut = bool(ends[i] < batch.bounds[i + 1])
        reason = _reason(int(num_eligible[i]), int(num_masks[i]), is_cut)
        if reason is None:
            kept.append(KeptSample(batch.first + i, int(ends[i] - starts[i]), int(num_eligible[i]), is_cut))
        else:
            dropped.append(Dropped(file=batch.file, line=batch.first + i + 1, id=sample_id, reason=reason))


def _count(flags: BoolArray, starts: IntArray, ends: IntArray) -> IntArray:
    total = np.concatenate([[0], np.cumsum(flags)])
    return total[ends] - total[starts]


def _reason(num_eligible: int, num_masks: int, is_cut: bool) -> str | None:
    if num_masks:
        return "holds the mask token"
    if num_eligible:
        return None
    return "no anchor position within max_tokens" if is_cut else "no anchor position"


def _refuse_if_poor(kept: list[KeptSample], dropped: list[Dropped], settings: TrainSettings) -> None:
    total = len(kept) + len(dropped)
    causes = told_reasons(count_reasons(dropped))
    if not kept:
        raise DataGateError(f"none of {total:,} samples of {settings.input} can be trained on: {causes}")
    if len(dropped) > settings.max_dropped_frac * total:
        raise DataGateError(
            f"{len(dropped):,} of {total:,} samples of {settings.input} would be dropped ({causes}), more than "
            f"max_dropped_frac {settings.max_dropped_frac:g}: choose another mask_id or max_tokens, look at the set "
            "with draftmill inspect, or raise --max-dropped-frac"
        )
