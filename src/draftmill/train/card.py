"""What a run says of itself: its plan before it starts, its card when it is done."""

import logging
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import msgspec

from draftmill.contracts.cards import PLAN_FILE, Card, InputFile, Plan, canonical_json, count_reasons, make_card
from draftmill.settings.train import TrainSettings
from draftmill.storage.checkpoints import (
    MARKER_FILE,
    WEIGHTS_FILE,
    Marker,
    find_checkpoint,
    holds_checkpoint,
    step_folder,
)
from draftmill.storage.fetch import SHA256
from draftmill.storage.growing import GrowingSet
from draftmill.storage.models import fingerprint
from draftmill.storage.provenance import Stopwatch, provenance
from draftmill.storage.sets import SetWriter
from draftmill.storage.store import sha256_of
from draftmill.train.data import TrainingData
from draftmill.train.logbook import Logbook
from draftmill.train.start import RANDOM, TARGET

log = logging.getLogger(__name__)

# Where a run reads and writes, its memory, who does the work, what its gate allows and what is measured do not change
# what it makes (but for the order of sums over several ranks, which is rounding).
_NOT_IN_PLAN = {
    *("input", "output", "target", "device", "dry_run", "feature_cache_bytes"),
    *("max_dropped_frac", "max_bad_steps", "min_agreement", "max_poisoned"),
    *("placement", "ranks", "target_ranks", "drafter_ranks", "target_gpus", "in_flight_bytes", "rank_timeout_s"),
    *("store_patience_s", "stall_timeout_s", "data_cache_bytes"),
    *("eval_every", "eval_input", "eval_decode_prompts", "eval_walk_prompts", "eval_max_new_tokens"),
    *("trackers", "tracker_project"),
}
# The card's closing figures are means over so many last steps: one step's are noise.
LAST_STEPS = 20


def plan_of(settings: TrainSettings, parts: GrowingSet, target: Path) -> Plan:
    """The plan: the settings that affect the outcome, the set it reads, and the target's identity.

    The set is named by its plan, which is known before its first part is made, and which says what every part is made
    of and how. A card would add the sha256 of each part: those stand on the run's own card, of the parts it has read.
    """
    recipe = {
        **settings.model_dump(mode="json", exclude=_NOT_IN_PLAN),
        "target": fingerprint(target),
        "is_caching_features": settings.feature_cache_bytes > 0,
        "init": _start_of(settings),
    }
    size = len(canonical_json(parts.plan))
    named = InputFile(key=PLAN_FILE, size=size, identity=SHA256 + parts.plan.hash)
    return Plan(room="train", recipe=recipe, inputs=(named,), parts=())


def _start_of(settings: TrainSettings) -> str:
    """What identifies the first weights: the word, or the hash of the drafter gone on from, wherever it lies."""
    if settings.init in (RANDOM, TARGET):
        return settings.init
    return sha256_of(find_checkpoint(settings.init) / WEIGHTS_FILE)


def card_of(plan: Plan, data: TrainingData, logbook: Logbook, watch: Stopwatch) -> Card:
    """The card of a finished run; its rows are the samples of the parts that its steps have reached."""
    state, num_parts = logbook.run, data.rows.parts_reached(data.num_steps)
    found = data.gated.first(num_parts)
    shape = state.drafter.shape
    last = logbook.metrics.last(LAST_STEPS)
    content = {
        "input_parts": {part.name: part.file.identity for part in map(data.samples.parts.part, range(num_parts))},
        "rows_in": len(found.kept) + len(found.dropped),
        "rows": len(found.kept),
        "tokens": found.num_tokens,
        "dropped": count_reasons(found.dropped),
        "cut": found.num_cut,
        "dropped_rows": msgspec.to_builtins(found.dropped),
        "num_steps": state.position.step,
        "num_bad_steps": state.position.num_bad,
        "poisoned": list(state.position.poisoned),
        "num_parameters": sum(parameter.numel() for parameter in state.drafter.parameters()),
        "mask_id": shape.mask_id,
        "tap_ids": list(shape.tap_ids),
        "block_size": shape.block_size,
        **{f"final_{key}": _mean(record[key] for record in last) for key in ("loss", "acceptance", "slot1_accuracy")},
        "checkpoints": [
            {"step": m.step, "marker": f"{step_folder(m.step)}/{MARKER_FILE}", "files": msgspec.to_builtins(m.files)}
            for m in logbook.checkpoints.markers()
        ],
    }
    return make_card("train", plan, (), content, provenance(watch))


def finished_card(writer: SetWriter) -> Card | None:
    """The card of a run that is done; None also where a checkpoint that it names is gone, cut or another run's: it is
    made again from the newest that is whole.
    """
    card = writer.card()
    for named in [] if card is None else card.content.get("checkpoints", []):
        marker = msgspec.convert({"plan": writer.plan.hash, **named}, Marker)
        for store in writer.stores:
            if not holds_checkpoint(store, marker):
                log.warning("%s: the checkpoint of step %d, which the card names, is gone", store.url, marker.step)
                return None
    return card


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of the steps that have a figure: a loss that was not finite stands as null."""
    found = [value for value in values if value is not None]
    return fmean(found) if found else None
