"""What a run is trained on: the set, what of it passed the gate, and which rows make which step."""

from dataclasses import dataclass
from pathlib import Path

from draftmill.chat.chat import open_chat
from draftmill.contracts.errors import RecipeError
from draftmill.extract.agreement import Text
from draftmill.settings.train import TrainSettings
from draftmill.speculation.requests import Request, read_material
from draftmill.storage.sets import SetReader, is_unfinished, open_set
from draftmill.train.gate import GatedSamples, check_tokenizer, gate, vocabulary_of
from draftmill.train.rows import RowPlan
from draftmill.train.samples import SampleSet


@dataclass(frozen=True)
class TrainingData:
    """A tokenized set, ready to be trained on."""

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
        return self.gated.mask_id

    def first_texts(self, count: int) -> list[Text]:
        """The first kept samples, as far as they are trained on."""
        kept = self.gated.kept[:count]
        samples = [self.samples[sample.index].cut(sample.length) for sample in kept]
        return [Text(s.input_ids.tolist(), int(s.loss_mask.argmax())) for s in samples]


def open_input(settings: TrainSettings) -> SetReader:
    """The tokenized set; RecipeError where its length is not known yet and nothing says how long to train."""
    if settings.num_steps is None and is_unfinished(settings.input):
        raise RecipeError(
            f"{settings.input} is unfinished: how many samples it will hold is not known yet, nor how many steps "
            f"num_epochs {settings.num_epochs} would take; set num_steps, or train when its draftmill tokenize is done"
        )
    return open_set(settings.input, "tokenize")


def read_data(settings: TrainSettings, reader: SetReader, target: Path) -> TrainingData:
    """Puts the set through the gate and lays out the run."""
    chat = open_chat(target)
    check_tokenizer(reader, chat, target)
    samples = SampleSet(reader)
    gated = gate(samples, vocabulary_of(target, chat), settings)
    rows = RowPlan(gated.kept, settings)
    num_steps = settings.num_steps or rows.num_steps(settings.num_epochs)
    held_out = read_material(settings.eval_input, chat).requests if settings.eval_every else ()
    return TrainingData(samples, gated, rows, num_steps, held_out, chat.stop_ids)
