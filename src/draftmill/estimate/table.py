"""The estimate as people read it: one line a figure."""

from typing import Any

from draftmill.estimate.cost import GIGA, TERA

KILO = 1e3


def readable(figures: dict[str, Any]) -> str:
    """The figures of `cost.cost` as lines of text."""
    return "".join(f"{name:<18}{says}\n" for name, says in [*_work(figures), *_room(figures), *_time(figures)])


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
    low, high = (size / GIGA for size in f["drafter_state_bytes"])
    borrowed, stored = f["embedding_and_head_bytes"] / GIGA, f["features_on_disk_bytes"] / TERA
    return [
        ("features", f"{f['feature_bytes'] / KILO:,.1f} kB a token, {_three(stored)} TB if they were stored"),
        ("drafter", f"{f['drafter_parameters']:,} parameters in {f['drafter_tensors']} tensors"),
        (
            "drafter state",
            f"{_three(low)} to {_three(high)} GB, and {_three(borrowed)} GB of frozen embedding and head",
        ),
    ]


def _time(f: dict[str, Any]) -> list[tuple[str, str]]:
    rate, epoch, total = f["tokens_per_s"], f["hours_per_epoch"], f["hours"]
    return [
        ("time", f"{epoch:,.1f} h an epoch at {rate:,.0f} tokens/s, {total:,.1f} h in all"),
        *(("approximate", note) for note in f["notes"]),
    ]


def _three(value: float) -> str:
    """Three significant digits, and never a power of ten."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
