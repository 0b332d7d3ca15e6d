"""The closing summary of a run: rows and tokens per stage, drops, acceptance before and after, places."""

from typing import Any

from draftmill.progress import duration
from draftmill.storage.provenance import Stopwatch

Cards = dict[str, dict[str, Any]]
_COUNTED = ("generate train", "generate held-out", "tokenize", "train")


def summarize_run(cards: Cards, places: dict[str, str], watch: Stopwatch) -> tuple[list[str], dict[str, Any]]:
    """Lines for the terminal and the closing object; `places` says where each stage's output lies."""
    found = cards["evaluate"]["content"]
    lines = ["", *_stage_lines(cards), "", *_acceptance_lines(found), "", *_place_lines(places)]
    spent = {name: card["run"]["seconds"] for name, card in cards.items() if "run" in card}
    lines.append(f"this call took {duration(watch.wall_s())}; the work itself {duration(sum(spent.values()))}")
    closing = {
        "room": "run",
        "tau": found["tau"],
        "tau_micro": found["tau_micro"],
        "tau_untrained": found["tau_untrained"],
        "lossless": found["lossless"],
        "ties": len(found["ties"]),
        "rows": {name: cards[name]["content"]["rows"] for name in _COUNTED},
        "tokens": {name: cards[name]["content"]["tokens"] for name in _COUNTED},
        "left_out": {name: _left_out(cards[name]["content"]) for name in _COUNTED},
        "seconds": round(watch.wall_s(), 1),
        "seconds_of_work": {name: round(seconds, 1) for name, seconds in spent.items()},
        "cpu_seconds_of_work": {name: c["run"]["cpu_seconds"] for name, c in cards.items() if "run" in c},
        "run": places["train"],
        "export": places["export"],
        "report": places["report"],
    }
    return lines, closing


def _stage_lines(cards: Cards) -> list[str]:
    lines = [f"{'stage':<20}{'rows':>8}{'tokens':>12}{'seconds':>10}{'cpu-s':>8}  left out"]
    for name in _COUNTED:
        content, run = cards[name]["content"], cards[name]["run"]
        left_out = ", ".join(f"{count} {reason}" for reason, count in _left_out(content).items()) or "none"
        lines.append(
            f"{name:<20}{content['rows']:>8,}{content['tokens']:>12,}"
            f"{run['seconds']:>10,.0f}{run['cpu_seconds']:>8,.0f}  {left_out}"
        )
    run = cards["evaluate"]["run"]
    prompts = cards["evaluate"]["content"]["rows"]
    lines.append(f"{'evaluate':<20}{prompts:>8,}{'':>12}{run['seconds']:>10,.0f}{run['cpu_seconds']:>8,.0f}")
    return lines


def _left_out(content: dict[str, Any]) -> dict[str, int]:
    """Rows in that are not rows out, by reason."""
    return {**content["dropped"], **content.get("set_aside", {}), **content.get("failed", {})}


def _acceptance_lines(found: dict[str, Any]) -> list[str]:
    first = found["untrained"]
    before = (
        f"untrained {first['tau']:.2f}, decoding {first['num_requests']} of them" if first else "untrained not measured"
    )
    lines = [
        f"acceptance length (tokens per verification cycle, bonus included, block {found['block_size']}): "
        f"tau {found['tau']:.2f} (micro {found['tau_micro']:.2f}), walked along {found['num_requests']} held-out "
        f"answers; {before}",
        f"lossless: {found['num_decoded']} held-out answers decoded equal the target's own greedy answers "
        f"token for token ({len(found['ties'])} numeric ties)",
    ]
    for family, figures in {**found["families"], **found["reported_apart"]}.items():
        note = "  (reported apart)" if family in found["reported_apart"] else ""
        if figures is not None:
            lines.append(f"  {family:<14}tau {figures['tau']:.2f} over {figures['num_requests']} prompts{note}")
    return lines


def _place_lines(places: dict[str, str]) -> list[str]:
    return [f"{name:<20}{place}" for name, place in places.items()]
