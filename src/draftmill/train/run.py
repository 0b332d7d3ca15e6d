"""`draftmill train`: the story of the room, from a tokenized set and a target to checkpoints and a card."""

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from draftmill.contracts.cards import canonical_json
from draftmill.extract.agreement import check_target
from draftmill.extract.taps import TapReader, check_taps
from draftmill.extract.target import Target, load_target, refuse_slow_hybrid
from draftmill.model.forms import attention_form
from draftmill.model.shape import DrafterShape
from draftmill.settings.train import TrainSettings
from draftmill.storage.models import locate
from draftmill.storage.provenance import Stopwatch
from draftmill.storage.sets import open_set_writer
from draftmill.train.batches import Batches, BatchSize, TargetFeatures
from draftmill.train.card import RECIPE_FILE, card_of, plan_of, preview
from draftmill.train.data import TrainingData, open_input, read_data
from draftmill.train.held_out import HeldOut
from draftmill.train.keep import Checkpoints
from draftmill.train.logbook import open_logbook
from draftmill.train.loop import LossOf, Schedule, train
from draftmill.train.metrics import MetricsLog
from draftmill.train.start import initial_drafter
from draftmill.train.state import RunState, new_run
from draftmill.train.trackers import check_trackers

# Samples that the target itself is asked about before anything is learnt from them.
NUM_CHECKED = 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run(settings: TrainSettings) -> dict[str, Any]:
    """Trains, or goes on training, to the last step; returns the card."""
    watch = Stopwatch()
    folder = locate(settings.target)
    check_trackers(settings.trackers)
    reader = open_input(settings)
    plan = plan_of(settings, reader, folder)
    if settings.dry_run:
        return preview(settings, plan, read_data(settings, reader, folder))
    writer = open_set_writer(settings.output, plan)
    if (card := writer.card()) is not None:
        return msgspec.to_builtins(card)
    writer.publish_file(RECIPE_FILE, canonical_json(settings.model_dump()))
    data = read_data(settings, reader, folder)
    checkpoints = Checkpoints(writer.stores, plan.hash, data.num_steps, settings.save_every, settings.keep_checkpoints)
    state, metrics = train_to_the_end(settings, data, open_target(folder, settings), checkpoints)
    return msgspec.to_builtins(writer.finish(card_of(plan, data, state, checkpoints, metrics, watch)))


def open_target(folder: Path, settings: TrainSettings) -> Target:
    """The frozen target where and as it computes."""
    torch.set_num_threads(settings.threads)
    target = load_target(folder, dtype=DTYPES[settings.compute_dtype])
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(found if settings.device == "auto" else settings.device)
    refuse_slow_hybrid(target, device)
    nn.Module.to(target.model, device)
    return target


def train_to_the_end(
    settings: TrainSettings, data: TrainingData, target: Target, checkpoints: Checkpoints
) -> tuple[RunState, MetricsLog]:
    """Starts or resumes the run, and trains it to its last step, telling of every one."""
    state = new_run(initial_drafter(target, settings, data.mask_id), settings)
    if not checkpoints.resume(state):
        checkpoints.save(state)
    held_out = HeldOut(target, data.held_out, data.stop_ids, settings) if data.held_out else None
    reader = TapReader(target, state.drafter.shape.tap_ids, has_last=settings.needs_last_state)
    texts = data.first_texts(NUM_CHECKED)
    check_taps(reader, torch.tensor([texts[0].token_ids]))
    check_target(target, texts, settings.min_agreement)
    schedule = schedule_of(settings, data, reader, state.drafter.shape)
    with open_logbook(state, checkpoints, held_out, settings) as logbook:
        train(state, schedule, settings, logbook.after_step)
    return state, logbook.metrics


def schedule_of(settings: TrainSettings, data: TrainingData, reader: TapReader, shape: DrafterShape) -> Schedule:
    """Which rows each step takes, how they become batches, and what they cost."""
    target = reader.target
    attention = attention_form(settings.attention, shape, target.device)
    features = TargetFeatures(
        reader, target.device, max_tokens=settings.max_tokens, cache_bytes=settings.feature_cache_bytes
    )
    size = BatchSize.of(settings, is_constant=attention.wants_constant_shapes)
    batches = Batches(data.samples, features, shape, settings.seed, size)
    loss_of = LossOf(target, settings, data.gated.seen_ids, attention)
    return Schedule(data.num_steps, data.rows.micros_of, batches.batch_at, loss_of)
