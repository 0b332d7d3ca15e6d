"""What one epoch costs: operations, bytes and hours, from the sizes of target and drafter and the amount of text."""

import math
from dataclasses import dataclass
from typing import Any

from draftmill.estimate.drafter import DrafterSize
from draftmill.estimate.target import TargetSize

GIGA = 1e9
TERA = 1e12
SECONDS_AN_HOUR = 3600


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The text of one epoch, and how densely blocks are drawn from it."""

    num_tokens: int
    mean_length: float
    num_epochs: float
    num_anchors: int
    max_tokens: int

    def slots_per_token(self, block_size: int) -> float:
        """Drafted block slots per context token; a sample cannot have more anchors than tokens."""
        drawn = math.ceil(self.num_anchors * self.mean_length / self.max_tokens)
        return min(drawn, self.mean_length) * block_size / self.mean_length


def cost(
    target: TargetSize, drafter: DrafterSize, tap_ids: tuple[int, ...], work: Workload, achieved_tflops: float
) -> dict[str, Any]:
    """Figures with their units in their names; operations and bytes are per context token unless they say otherwise.

    A token sees half of its sample on average. The target runs only up to the last tap, and not its head.
    """
    context = work.mean_length / 2
    slots = work.slots_per_token(drafter.block_size)
    target_flop = target.forward_flop(context, tap_ids[-1] + 1)
    per_token = drafter.context_flop()
    per_slot = drafter.slot_flop(context, target.head_weights)
    drafter_flop = per_token + slots * per_slot
    hours = work.num_tokens * (target_flop + drafter_flop) / (achieved_tflops * TERA) / SECONDS_AN_HOUR
    return {
        "num_tokens": work.num_tokens,
        "mean_length": work.mean_length,
        "tap_ids": list(tap_ids),
        "target_gflop": target.forward_flop(context) / GIGA,
        "target_gflop_to_last_tap": target_flop / GIGA,
        "drafter_gflop_per_context_token": per_token / GIGA,
        "drafter_gflop_per_slot": per_slot / GIGA,
        "slots_per_token": slots,
        "drafter_to_target_ratio": drafter_flop / target_flop,
        "feature_bytes": drafter.feature_bytes,
        "features_on_disk_bytes": drafter.feature_bytes * work.num_tokens,
        "drafter_parameters": drafter.num_parameters,
        "drafter_tensors": drafter.num_tensors,
        "drafter_state_bytes": list(drafter.state_bytes),
        "embedding_and_head_bytes": target.borrowed_bytes,
        "tokens_per_s": achieved_tflops * TERA / (target_flop + drafter_flop),
        "hours_per_epoch": hours,
        "hours": hours * work.num_epochs,
        "notes": list(target.notes),
    }
