"""What a run is trained on: the set, what of it passed the gate, and which rows make which step."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from draftmill.chat.chat import open_chat
from draftmill.contracts.errors import RecipeError
from draftmill.extract.agreement import Text
from draftmill.settings.train import TrainSettings
from draftmill.speculation.requests import Request, read_material
from draftmill.storage.growing import GrowingSet, open_growing
from draftmill.storage.models import window_tokens
from draftmill.storage.patience import Patiently
from draftmill.storage.waiting import Waiting
from draftmill.train.gate import GatedSamples, check_tokenizer, gate, vocabulary_of
from draftmill.train.layout import layout_of
from draftmill.train.rows import RowPlan
from draftmill.train.samples import SampleSet

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingData:
    """A tokenized set, ready to be trained on, as far as it is there."""

    samples: SampleSet
    gated: GatedSamples
    rows: RowPlan
    num_steps: int
    held_out: tuple[Request, ...]
    """What acceptance is measured on while training; empty: it is not."""
    stop_ids: frozenset[int]
    """Tokens that end an answer."""

    @property
    def mask_id(self) -> int:
        """The token that stands for a slot to be drafted."""
        return self.gated.rule.mask_id

    def heed(self, check: Callable[[], None]) -> None:
        """Has `check` called again and again while a part is awaited; it may raise."""
        self.samples.parts.waiting.heed = check

    def first_texts(self, count: int) -> Iterator[Text]:
        """The first `count` kept samples, as far as they are trained on; a part is waited for when it is reached."""
        kept = chain.from_iterable(map(self.gated.kept, range(self.samples.parts.num_parts)))
        for sample in islice(kept, count):
            read = self.samples[sample.index].cut(sample.length)
            yield Text(read.input_ids.tolist(), int(read.loss_mask.argmax()))


def open_input(settings: TrainSettings) -> GrowingSet:
    """The tokenized set, finished or not; RecipeError where settings ask for what only a finished one can tell."""
    waiting = Waiting(settings.stall_timeout_s)
    parts = open_growing(settings.input, "tokenize", waiting, Patiently(settings.store_patience_s))
    if parts.was_finished:
        return parts
    if settings.num_steps is None:
        raise RecipeError(
            f"{settings.input} is unfinished: how many samples it will hold is not known yet, nor how many steps "
            f"--num-epochs {settings.num_epochs} would take; set --num-steps, or train when its draftmill tokenize is "
            "done"
        )
    if settings.loss_vocab == "seen":
        raise RecipeError(
            f"{settings.input} is unfinished: which tokens occur in it is not known yet; set --loss-vocab all, or "
            "train when its draftmill tokenize is done"
        )
    _refuse_hasty_ranks(settings)
    return parts


def _refuse_hasty_ranks(settings: TrainSettings) -> None:
    """RecipeError where ranks would give each other up before what all of them wait for is given up."""
    if layout_of(settings).world > 1 and settings.stall_timeout_s >= settings.rank_timeout_s:
        raise RecipeError(
            f"{settings.input} is unfinished, and --stall-timeout-s {settings.stall_timeout_s:g} is not less than "
            f"--rank-timeout-s {settings.rank_timeout_s:g}: a rank that waits for the next part would be taken for "
            "lost by the others; raise --rank-timeout-s, or lower --stall-timeout-s"
        )


def read_data(settings: TrainSettings, parts: GrowingSet, target: Path) -> TrainingData:
    """Puts the set through the gate and lays out the run."""
    chat = open_chat(target)
    check_tokenizer(parts, chat, target)
    log.info("reading %s: %d parts", parts.store.url, parts.num_parts)
    samples = SampleSet(parts, settings.data_cache_bytes)
    vocabulary = vocabulary_of(target, chat)
    gated = gate(samples, vocabulary, settings, window_tokens(target))

    def before_second_epoch() -> None:
        parts.complete()
        samples.refuse_endless_fetching()

    rows = RowPlan(parts.num_parts, gated.kept, settings, before_second_epoch)
    num_steps = settings.num_steps or rows.num_steps(settings.num_epochs)
    held_out = read_material(settings.eval_input, chat, vocabulary.num_rows).requests if settings.eval_every else ()
    return TrainingData(samples, gated, rows, num_steps, held_out, chat.stop_ids)
