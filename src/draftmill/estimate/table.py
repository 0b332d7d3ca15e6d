"""The estimate as people read it: one line a figure."""

from typing import Any

from draftmill.estimate.cost import GIGA, SECONDS_AN_HOUR, TERA
from draftmill.progress import duration

KILO = 1e3
_UNITS = {TERA: "TB", GIGA: "GB", 1e6: "MB"}
# Shorter times are told in minutes and seconds.
_FEWEST_HOURS = 0.1


def readable(figures: dict[str, Any], achieved_tflops: float) -> str:
    """The figures of `cost.cost` as lines of text, and the speed that they take for granted."""
    lines = [*_work(figures), *_room(figures), *_time(figures, achieved_tflops)]
    return "".join(f"{name:<18}{says}\n" for name, says in lines)


def _work(f: dict[str, Any]) -> list[tuple[str, str]]:
    tap, slots = f["tap_ids"][-1], f["slots_per_token"]
    return [
        ("text", f"{f['num_tokens']:,} tokens, {f['mean_length']:,.0f} a sample"),
        ("target forward", f"{_three(f['target_gflop'])} GFLOP a token"),
        ("  to the last tap", f"{_three(f['target_gflop_to_last_tap'])} GFLOP a token (layer {tap})"),
        ("drafter, context", f"{_three(f['drafter_gflop_per_context_token'])} GFLOP a token, forward and backward"),
        ("drafter, block", f"{_three(f['drafter_gflop_per_slot'])} GFLOP a slot, {slots:.2f} slots a token"),
        ("drafter / target", f"{f['drafter_to_target_ratio']:.2f}"),
    ]


def _room(f: dict[str, Any]) -> list[tuple[str, str]]:
    low, high = map(_size, f["drafter_state_bytes"])
    borrowed, stored = _size(f["embedding_and_head_bytes"]), _size(f["features_on_disk_bytes"])
    return [
        ("features", f"{f['feature_bytes'] / KILO:,.1f} kB a token, {stored} if they were stored"),
        ("drafter", f"{f['drafter_parameters']:,} parameters in {f['drafter_tensors']} tensors"),
        (
            "drafter state",
            f"{low} to {high}, and {borrowed} of frozen embedding and head",
        ),
    ]


def _time(f: dict[str, Any], achieved_tflops: float) -> list[tuple[str, str]]:
    rate, epoch, total = f["tokens_per_s"], _span(f["hours_per_epoch"]), _span(f["hours"])
    return [
        ("time", f"{epoch} an epoch at {rate:,.0f} tokens/s, {total} in all"),
        (
            "  supposing",
            f"{achieved_tflops:g} TFLOP/s that all devices together really achieve (a fraction of what they are sold "
            "with): give yours by --achieved-tflops",
        ),
        *(("approximate", note) for note in f["notes"]),
    ]


def _span(hours: float) -> str:
    seconds = hours * SECONDS_AN_HOUR
    if hours >= _FEWEST_HOURS:
        return f"{hours:,.1f} h"
    return duration(seconds) if seconds >= 1 else "less than 1 s"


def _size(num_bytes: float) -> str:
    """Three significant digits in the largest unit that leaves one before the point."""
    unit = next((unit for unit in _UNITS if num_bytes >= unit), KILO)
    return f"{_three(num_bytes / unit)} {_UNITS.get(unit, 'kB')}"


def _three(value: float) -> str:
    """Three significant digits, and never a power of ten."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
