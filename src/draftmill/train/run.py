"""`draftmill train`: the story of the room, from a tokenized set and a target to checkpoints and a card."""

from typing import Any

import msgspec

from draftmill.contracts.cards import RECIPE_FILE, Plan, canonical_json
from draftmill.settings.train import TrainSettings
from draftmill.storage.lock import sole_writer
from draftmill.storage.models import in_full, locate
from draftmill.storage.patience import Patiently
from draftmill.storage.provenance import Stopwatch
from draftmill.storage.sets import SetWriter, open_set_writer
from draftmill.train.advice import advise
from draftmill.train.card import card_of, finished_card, plan_of
from draftmill.train.data import TrainingData, open_input, read_data
from draftmill.train.keep import Checkpoints
from draftmill.train.launch import start_ranks
from draftmill.train.layout import layout_of, started_ranks
from draftmill.train.preview import preview
from draftmill.train.ranks import joined
from draftmill.train.roles import Job, take_part
from draftmill.train.start import check_shape
from draftmill.train.trackers import check_trackers


def run(settings: TrainSettings) -> dict[str, Any]:
    """Trains, or goes on training, to the last step; returns the card. With several ranks each of them calls this."""
    watch = Stopwatch()
    folder = locate(settings.target)
    check_trackers(settings.trackers)
    parts = open_input(settings)
    plan = plan_of(settings, parts, folder)
    layout = layout_of(settings)
    if settings.dry_run:
        return preview(settings, plan, parts, folder)
    if layout.world > 1 and started_ranks() is None:
        with sole_writer(settings.output):  # until then; rank 0 holds it from its own start on
            card = _finished(open_set_writer(settings.output, plan))
        return card or start_ranks(run, settings, layout)
    with joined(settings) as ranks, sole_writer(settings.output if ranks.is_writer else ()):
        writer = open_set_writer(settings.output, plan) if ranks.is_writer else None
        if (card := ranks.tell(writer and _finished(writer))) is not None:
            return card
        data = read_data(settings, parts, folder)
        if writer is not None:
            writer.publish_file(
                RECIPE_FILE, canonical_json(settings.model_dump() | {"target": in_full(settings.target)})
            )
            check_shape(settings, folder, data.mask_id)
            advise(settings, ranks.layout, ranks.device.type, folder)
        checkpoints = None if writer is None else _checkpoints(settings, plan, data, writer)
        logbook = take_part(Job(settings, data, folder, ranks), checkpoints)
        if writer is not None and logbook is not None:
            card = msgspec.to_builtins(writer.finish(card_of(plan, data, logbook, watch)))
        card = ranks.tell(card)
    assert card is not None, "rank 0 tells the card"
    return card


def _finished(writer: SetWriter) -> dict[str, Any] | None:
    """The card of a run that is done."""
    card = finished_card(writer)
    return None if card is None else msgspec.to_builtins(card)


def _checkpoints(settings: TrainSettings, plan: Plan, data: TrainingData, writer: SetWriter) -> Checkpoints:
    every = settings.save_every, settings.keep_checkpoints, Patiently(settings.store_patience_s)
    return Checkpoints(writer.stores, plan.hash, data.num_steps, *every)
