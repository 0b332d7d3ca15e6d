"""What `draftmill train --dry-run` shows, and refuses as the run itself would before the target is loaded."""

import sys
from pathlib import Path
from typing import Any

import msgspec

from draftmill.contracts.cards import Plan
from draftmill.extract.spread import device_kind
from draftmill.settings.train import TrainSettings
from draftmill.storage.checkpoints import find_marker, holds_checkpoint, steps_on
from draftmill.storage.growing import GrowingSet
from draftmill.storage.sets import SetWriter, find_set_writer
from draftmill.train.advice import advise
from draftmill.train.card import finished_card
from draftmill.train.data import TrainingData, read_data
from draftmill.train.layout import layout_of
from draftmill.train.start import check_shape


def preview(settings: TrainSettings, plan: Plan, parts: GrowingSet, target: Path) -> dict[str, Any]:
    """Recipe, inputs, outputs and the steps left, also on stderr; writes nothing."""
    writer = find_set_writer(settings.output, plan)
    data = read_data(settings, parts, target)
    check_shape(settings, target, data.mask_id)
    advise(settings, layout_of(settings), device_kind(settings.device), target)
    is_done = len(writer.stores) == len(settings.output) and finished_card(writer) is not None
    shown = {
        "room": "train",
        "dry_run": True,
        "recipe": settings.model_dump(mode="json"),
        "inputs": _inputs(data),
        "outputs": {"urls": list(settings.output), "mask_id": data.mask_id, "num_steps": data.num_steps},
        "left": {"steps": data.num_steps - _steps_done(writer)},
        "done": is_done,
    }
    lines = [f"{key}: {msgspec.json.encode(value).decode()}" for key, value in shown.items()]
    sys.stderr.write("\n".join(lines) + "\n")
    return shown


def _inputs(data: TrainingData) -> dict[str, int]:
    """What is there of the set, and what of it is trained on."""
    parts = data.samples.parts
    num_there = next((i for i in range(parts.num_parts) if parts.find(i) is None), parts.num_parts)
    found = data.gated.first(num_there)
    return {
        "planned_parts": parts.num_parts,
        "parts": num_there,
        "bytes": sum(parts.part(i).file.size for i in range(num_there)),
        "samples": len(found.kept),
        "dropped": len(found.dropped),
        "cut": found.num_cut,
        "tokens": found.num_tokens,
    }


def _steps_done(writer: SetWriter) -> int:
    """The newest step of which some output holds a checkpoint of this plan: the run goes on from there."""
    found = [(store, find_marker(store, step)) for store in writer.stores for step in steps_on(store)]
    ours = [(store, marker) for store, marker in found if marker is not None and marker.plan == writer.plan.hash]
    return max((marker.step for store, marker in ours if holds_checkpoint(store, marker)), default=0)
