"""`draftmill estimate`: what a training run will cost, before anything runs. No torch.

In: a target's config.json, the drafter's shape, and a tokenized set's card or the amount of text. Out: figures.
"""

import sys
from typing import Any

from draftmill.contracts.errors import InputError
from draftmill.contracts.taps import chosen_tap_ids
from draftmill.estimate.cost import Workload, cost
from draftmill.estimate.drafter import DrafterSize
from draftmill.estimate.table import readable
from draftmill.estimate.target import TargetSize, read_target_size
from draftmill.settings.estimate import EstimateSettings
from draftmill.storage.models import locate
from draftmill.storage.sets import open_set


def run(settings: EstimateSettings) -> dict[str, Any]:
    """Prints the estimate for people and returns it; nothing is written, so that a dry run differs in nothing."""
    target = read_target_size(locate(settings.target, weights=False))
    tap_ids = chosen_tap_ids(settings.tap_ids, settings.num_taps, len(target.layers))
    drafter = drafter_of(settings, target, len(tap_ids))
    figures = cost(target, drafter, tap_ids, workload(settings), settings.achieved_tflops)
    sys.stderr.write(readable(figures, settings.achieved_tflops))
    return {"room": "estimate", "dry_run": settings.dry_run, "target": settings.target, **figures}


def drafter_of(settings: EstimateSettings, target: TargetSize, num_taps: int) -> DrafterSize:
    """The drafter's shape: the target's own where the settings say nothing."""
    return DrafterSize(
        hidden_size=target.hidden_size,
        num_layers=settings.num_layers,
        num_taps=num_taps,
        block_size=settings.block_size,
        num_heads=settings.num_heads or target.num_heads,
        num_kv_heads=settings.num_kv_heads or target.num_kv_heads,
        head_dim=settings.head_dim or target.head_dim,
        intermediate_size=settings.intermediate_size or target.intermediate_size,
    )


def workload(settings: EstimateSettings) -> Workload:
    """The amount of text: what the tokenized set's card says, or what the settings say."""
    num_tokens, mean_length = settings.num_tokens, settings.mean_length
    if settings.input is not None:
        content = open_set(settings.input, "tokenize").card.content
        if not content["samples"]:
            raise InputError(f"{settings.input} holds no samples: there is nothing to estimate")
        num_tokens, mean_length = content["tokens"], content["tokens"] / content["samples"]
    return Workload(
        num_tokens=num_tokens,
        mean_length=mean_length,
        num_epochs=settings.num_epochs,
        num_anchors=settings.num_anchors,
        max_tokens=settings.max_tokens,
    )
