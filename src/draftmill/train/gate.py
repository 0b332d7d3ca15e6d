"""The gate before training: is this set this target's, is the mask token free, is there anything to learn.

Samples longer than a row, or than the target's window, are cut there and counted: the length that a sample is kept with
is the one that everybody reads. Samples that cannot be trained on are dropped and listed: without an anchor position,
or holding the mask token. A finished set is judged as a whole before the first step, one that is still being made part
by part as they come: refused where nothing is left, or more is dropped than `max_dropped_frac`. What was found in a
part is remembered by its content, so that a run that goes on need not read it again.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from msgspec import structs

from draftmill.chat.chat import Chat
from draftmill.contracts.cards import Dropped, count_reasons, told_reasons
from draftmill.contracts.errors import DataGateError, InputError, RecipeError
from draftmill.settings.train import TrainSettings
from draftmill.storage.growing import GrowingSet
from draftmill.storage.models import text_config, vocab_size
from draftmill.train.remember import remembered
from draftmill.train.samples import BoolArray, IntArray, SampleBatch, SampleSet

# A part of fewer samples than these is not refused for its share of dropped ones: a share of so few says nothing.
MIN_JUDGED = 20


@dataclass(frozen=True)
class KeptSample:
    """A sample that is trained on: its index in the set, its tokens, and how many of them can be an anchor."""

    index: int
    length: int
    num_eligible: int
    is_cut: bool = False
    """Whether it is longer in the set: what lies beyond `length` tokens is left out."""


@dataclass(frozen=True)
class SampleRule:
    """What a sample may not hold, and how many of its tokens are trained on at most."""

    mask_id: int
    max_tokens: int
    """A row's, or those of the target's window where that is smaller: several samples may share a row, each has its own
    positions."""


@dataclass(frozen=True)
class Findings:
    """What of some samples is trained on, and what is not, with the reason."""

    kept: tuple[KeptSample, ...]
    dropped: tuple[Dropped, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the kept samples, supervised or not."""
        return sum(sample.length for sample in self.kept)

    @property
    def num_cut(self) -> int:
        """Kept samples of which only the beginning is trained on."""
        return sum(sample.is_cut for sample in self.kept)


@dataclass(frozen=True)
class Occurring:
    """Tokens that occur in a part, ascending."""

    ids: list[int]


@dataclass(frozen=True)
class Vocabulary:
    """What the gate must know of a target: rows of its embedding, and ids that can never stand for a mask."""

    num_rows: int
    reserved: frozenset[int]
    tokenizer_ids: frozenset[int]


def vocabulary_of(target: Path, chat: Chat) -> Vocabulary:
    """The vocabulary of the target in a folder, read without loading it; InputError where its size is not told."""
    config = text_config(target)
    num_rows = vocab_size(target)
    configured = [config.get(key) for key in ("pad_token_id", "eos_token_id", "bos_token_id")]
    listed = [i for value in configured for i in (value if isinstance(value, list) else [value]) if i is not None]
    ids = chat.tokenizer.get_vocab(with_added_tokens=True)
    named = {ids[token] for name, token in chat.special_tokens.items() if name != "mask_token" and token in ids}
    return Vocabulary(num_rows, chat.stop_ids | named | set(listed), frozenset(ids.values()))


def check_tokenizer(parts: GrowingSet, chat: Chat, target: Path) -> None:
    """InputError where the set was tokenized with another tokenizer than the target's."""
    made_with = parts.plan.recipe["tokenizer_hash"]
    if made_with != chat.tokenizer_hash:
        raise InputError(
            f"{parts.store.url} was tokenized with another tokenizer (sha256 {made_with[:12]}…) than the one in "
            f"{target} ({chat.tokenizer_hash[:12]}…): tokenize it with this one, or name the target it was made for"
        )


class GatedSamples:
    """What is trained on of each part of the plan; a part is judged when it is first asked for."""

    def __init__(self, samples: SampleSet, vocabulary: Vocabulary, settings: TrainSettings, rule: SampleRule) -> None:
        self.rule = rule
        self._samples = samples
        self._vocabulary = vocabulary
        self._settings = settings
        self._judged: dict[int, Findings] = {}

    def kept(self, part: int) -> tuple[KeptSample, ...]:
        """What of a part is trained on; DataGateError where it is part of an unfinished set, and will not do."""
        return self._found(part).kept

    def first(self, num_parts: int) -> Findings:
        """What is found in the first parts of the plan, together."""
        found = [self._found(part) for part in range(num_parts)]
        return Findings(tuple(k for f in found for k in f.kept), tuple(d for f in found for d in f.dropped))

    def seen_ids(self) -> tuple[int, ...]:
        """Every token that occurs in the set, ascending."""
        return tuple(np.flatnonzero(_used_ids(self._samples, self._vocabulary)).tolist())

    def _found(self, part: int) -> Findings:
        if part not in self._judged:
            _ids_of(self._samples, part, self._vocabulary)
            found = _sorted_out(self._samples, part, self.rule)
            if not self._samples.parts.was_finished:
                file = self._samples.parts.part(part).file.key
                _refuse_if_poor(found, f"{file} of {self._settings.input}", self._settings, MIN_JUDGED)
            self._judged[part] = found
        return self._judged[part]


def gate(samples: SampleSet, vocabulary: Vocabulary, settings: TrainSettings, window: int | None) -> GatedSamples:
    """The samples to train on; DataGateError or InputError where the set or the mask token will not do.

    `window`: tokens that the target can read of one document, where its config tells.
    """
    max_tokens = settings.max_tokens if window is None else min(settings.max_tokens, window)
    rule = SampleRule(_mask_id(settings.mask_id, vocabulary, samples), max_tokens)
    gated = GatedSamples(samples, vocabulary, settings, rule)
    if samples.parts.was_finished:
        found = gated.first(samples.parts.num_parts)
        if not found.kept and not found.dropped:
            raise InputError(f"{settings.input} holds no samples: tokenize again and look at its card")
        _refuse_if_poor(found, settings.input, settings, 1)
    return gated


def _ids_of(samples: SampleSet, part: int, vocabulary: Vocabulary) -> IntArray:
    """Every token that occurs in a part, ascending; InputError where the target has no such token."""
    file = samples.parts.part(part).file
    found = remembered([file.identity, "ids"], Occurring, lambda: _distinct(samples, part, vocabulary.num_rows))
    ids = np.array(found.ids, dtype=np.int64)
    if len(ids) and (ids[0] < 0 or ids[-1] >= vocabulary.num_rows):
        raise InputError(
            f"{file.key} holds token ids {ids[0]} … {ids[-1]}, but the target's embedding has "
            f"{vocabulary.num_rows:,} rows: it was tokenized for another target"
        )
    return ids


def _distinct(samples: SampleSet, part: int, num_rows: int) -> Occurring:
    """Marked in a table of `num_rows`, a twelfth of what sorting takes; a part with other ids is refused anyway."""
    used = np.zeros(num_rows, dtype=np.bool_)
    for batch in samples.batches(part):
        ids = batch.input_ids
        if len(ids) and not 0 <= ids.min() <= ids.max() < num_rows:
            return Occurring(np.unique(np.concatenate([b.input_ids for b in samples.batches(part)])).tolist())
        used[ids] = True
    return Occurring(np.flatnonzero(used).tolist())


def _used_ids(samples: SampleSet, vocabulary: Vocabulary) -> BoolArray:
    used = np.zeros(vocabulary.num_rows, dtype=np.bool_)
    for part in range(samples.parts.num_parts):
        used[_ids_of(samples, part, vocabulary)] = True
    return used


def _mask_id(named: int | None, vocabulary: Vocabulary, samples: SampleSet) -> int:
    """The mask token: the recipe's, checked; or the first row that the tokenizer leaves, or else that the data leave.

    Data are asked only where the tokenizer names every row: what is known from the start is the same for a set that is
    finished and one that is not. RecipeError where the data must be asked and are not all there.
    """
    if named is not None:
        if named >= vocabulary.num_rows:
            raise RecipeError(f"--mask-id {named} lies outside the target's embedding of {vocabulary.num_rows:,} rows")
        if named in vocabulary.reserved:
            raise RecipeError(f"--mask-id {named} is the target's pad, eos or bos token: name a row that means nothing")
        return named
    taken = vocabulary.reserved | vocabulary.tokenizer_ids
    if (row := next((i for i in range(vocabulary.num_rows) if i not in taken), None)) is not None:
        return row
    if not samples.parts.was_finished:
        raise RecipeError(
            f"{samples.parts.store.url} is unfinished, and the tokenizer names all {vocabulary.num_rows:,} rows of the "
            "target's embedding: which of them the data leave for a mask token is not known yet; name one with "
            "--mask-id"
        )
    free = [i for i in np.flatnonzero(~_used_ids(samples, vocabulary)).tolist() if i not in vocabulary.reserved]
    if not free:
        raise DataGateError(
            "no embedding row is left for a mask token: the data use every one; name one with --mask-id"
        )
    return free[0]


def _sorted_out(samples: SampleSet, part: int, rule: SampleRule) -> Findings:
    """What is trained on of a part; samples are numbered as in the whole set."""
    file = samples.parts.part(part).file

    def make() -> Findings:
        kept: list[KeptSample] = []
        dropped: list[Dropped] = []
        for batch in samples.batches(part):
            _sort_out(batch, rule, kept, dropped)
        return Findings(tuple(kept), tuple(dropped))

    found = remembered([file.identity, "kept", rule.mask_id, rule.max_tokens], Findings, make)
    first = samples.start_of(part)
    return Findings(
        tuple(replace(sample, index=first + sample.index) for sample in found.kept),
        tuple(structs.replace(row, line=first + row.line) for row in found.dropped),
    )


def _sort_out(batch: SampleBatch, rule: SampleRule, kept: list[KeptSample], dropped: list[Dropped]) -> None:
    starts, ends = batch.bounds[:-1], np.minimum(batch.bounds[1:], batch.bounds[:-1] + rule.max_tokens)
    eligible = batch.loss_mask.copy()
    eligible[:-1] &= batch.loss_mask[1:]
    eligible[ends[ends > starts] - 1] = False  # a sample's last token has no successor, nor the last before a cut
    num_eligible = _count(eligible, starts, ends)
    num_masks = _count(batch.input_ids == rule.mask_id, starts, ends)
    for i, sample_id in enumerate(batch.ids):
        is_cut = bool(ends[i] < batch.bounds[i + 1])
        reason = _reason(int(num_eligible[i]), int(num_masks[i]), rule.max_tokens if is_cut else None)
        if reason is None:
            kept.append(KeptSample(batch.first + i, int(ends[i] - starts[i]), int(num_eligible[i]), is_cut))
        else:
            dropped.append(Dropped(file=batch.file, line=batch.first + i + 1, id=sample_id, reason=reason))


def _count(flags: BoolArray, starts: IntArray, ends: IntArray) -> IntArray:
    total = np.concatenate([[0], np.cumsum(flags)])
    return total[ends] - total[starts]


def _reason(num_eligible: int, num_masks: int, cut_at: int | None) -> str | None:
    if num_masks:
        return "holds the mask token"
    if num_eligible:
        return None
    return "no anchor position" if cut_at is None else f"no anchor position within its first {cut_at:,} tokens"


def _refuse_if_poor(found: Findings, what: str, settings: TrainSettings, min_judged: int) -> None:
    total = len(found.kept) + len(found.dropped)
    causes = told_reasons(count_reasons(found.dropped))
    if total and not found.kept:
        raise DataGateError(f"none of {total:,} samples of {what} can be trained on: {causes}")
    if total >= min_judged and len(found.dropped) > settings.max_dropped_frac * total:
        raise DataGateError(
            f"{len(found.dropped):,} of {total:,} samples of {what} would be dropped ({causes}), more than "
            f"--max-dropped-frac {settings.max_dropped_frac:g}: choose another --mask-id or --max-tokens (where "
            "the target's window allows more), look at the set with draftmill inspect, or raise it"
        )
