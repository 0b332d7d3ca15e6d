"""What a run is told once, before its first step: settings that can be followed, and cost more than they need to."""

import logging
from pathlib import Path

from draftmill.settings.train import TrainSettings
from draftmill.storage.models import text_config, window_tokens
from draftmill.train.layout import Layout, started_ranks

log = logging.getLogger(__name__)

# What CUDA devices multiply several times faster than float32.
_FAST_DTYPES = ("bfloat16", "float16")


def advise(settings: TrainSettings, layout: Layout, device: str, target: Path) -> None:
    """Warns of what the settings waste on a kind of device."""
    config = text_config(target)
    declared = config.get("dtype") or config.get("torch_dtype")  # the newer name, and the older one
    wasted = uneven_rows(settings, layout), slow_dtype(settings, device, declared)
    for told in (*wasted, beyond_window(settings, window_tokens(target))):
        if told is not None:
            log.warning("%s", told)


def beyond_window(settings: TrainSettings, window: int | None) -> str | None:
    """What is left out where a row may hold more than the target can read of one sample."""
    if window is None or settings.max_tokens <= window:
        return None
    return (
        f"--max-tokens {settings.max_tokens} lies above the target's window of {window} tokens: a row may hold as "
        "many, but what of a sample lies beyond the window is left out (the card counts such samples as cut)"
    )


def uneven_rows(settings: TrainSettings, layout: Layout) -> str | None:
    """What to set where the rows of a step cannot be dealt evenly to the drafter ranks."""
    rows, ranks = settings.rows_per_step, layout.num_drafters
    if rows % ranks == 0:
        return None
    fewer = max(count for count in range(1, min(rows, ranks) + 1) if rows % count == 0)
    few, more = rows // ranks, rows // ranks + 1
    what = (
        f"a step leaves {ranks - rows} of them without a row"
        if few == 0
        else f"a step has {more} rows for {rows % ranks} of them and {few} for the others, which wait"
    )
    return (
        f"--rows-per-step {rows} over {ranks} drafter ranks: {what}; set --rows-per-step {ranks * more} (which makes "
        f"it another run, of larger steps), or {_flag(layout)} {fewer}"
    )


def _flag(layout: Layout) -> str:
    """What says how many drafter ranks there are."""
    if layout.is_split:
        return "--drafter-ranks"
    return "--ranks" if started_ranks() is None else "torchrun's --nproc-per-node (over all its nodes)"


def slow_dtype(settings: TrainSettings, device: str, declared: object) -> str | None:
    """What to set where a CUDA device computes in float32 what the target is served in half of."""
    if device != "cuda" or settings.compute_dtype != "float32" or declared not in _FAST_DTYPES:
        return None
    return (
        f"the target's config.json declares {declared}, and --compute-dtype is float32, which CUDA computes several "
        "times slower: --compute-dtype bfloat16 makes it another run, whose weights, moments and loss stay float32"
    )
