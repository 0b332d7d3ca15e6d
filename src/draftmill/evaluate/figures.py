"""The figures of an evaluation: acceptance length over the headline families, per family, decoded and untrained."""

from collections.abc import Sequence
from typing import Any

import msgspec

from draftmill.contracts.acceptance import summarize
from draftmill.contracts.errors import InputError
from draftmill.evaluate.parts import Measured, Spending

DEFINITION = (
    "tau is the mean number of tokens emitted per verification cycle, the bonus token included: the mean over requests "
    "of each request's mean (tau), and over all cycles (tau_micro). The prefill's token is no cycle's; a cycle cut by "
    "a stop token or by max_new_tokens counts what it emitted up to there, the stop token included."
)


def figures(rows: Sequence[Measured], reported_apart: Sequence[str], block_size: int) -> dict[str, Any]:
    """Everything the card says about acceptance; InputError where no headline answer has a cycle."""
    headline = [row for row in rows if row.family not in reported_apart]
    decoded = [row.decoded for row in headline if row.decoded is not None]
    untrained = [row.untrained for row in headline if row.untrained is not None]
    whole = acceptance([row.walked for row in headline], block_size)
    if whole is None:
        raise InputError("every headline answer is a single token: there is no verification cycle to measure")
    first = acceptance(untrained, block_size)
    ties = [{"id": row.id, **msgspec.to_builtins(tie)} for row in rows for tie in row.ties]
    return {
        **whole,
        "temperature": 0.0,
        "definition": DEFINITION,
        "lossless": True,  # a difference that no tie explains never gets this far
        "num_decoded": len(decoded),
        "ties": ties,
        "decoded": acceptance(decoded, block_size),
        "tokens_per_target_pass": tokens_per_pass(decoded),
        "tau_untrained": first["tau"] if first else None,
        "untrained": first,
        "families": _by_family(headline, block_size),
        "reported_apart": _by_family([row for row in rows if row.family in reported_apart], block_size),
    }


def acceptance(requests: Sequence[Sequence[int]], block_size: int) -> dict[str, Any] | None:
    """Acceptance figures of some requests; None where they have no cycle."""
    return msgspec.to_builtins(summarize(requests, block_size)) if any(requests) else None


def tokens_per_pass(decoded: Sequence[Sequence[int]]) -> float | None:
    """Tokens per pass of the target, its prefill (one token) included; plain decoding has 1."""
    passes = sum(1 + len(cycles) for cycles in decoded)
    return sum(1 + sum(cycles) for cycles in decoded) / passes if passes else None


def _by_family(rows: Sequence[Measured], block_size: int) -> dict[str, Any]:
    families = sorted({row.family for row in rows})
    return {family: acceptance([r.walked for r in rows if r.family == family], block_size) for family in families}


def timings(spending: Spending) -> dict[str, Any]:
    """Seconds and passes of plain and speculative decoding and of the walk, and plain over speculative."""
    told = {name: msgspec.to_builtins(spent) for name, spent in sorted(spending.items())}
    if "plain" in spending and "speculative" in spending:
        plain, fast = spending["plain"], spending["speculative"]
        told["speedup_wall"] = plain.wall_s / max(fast.wall_s, 1e-9)
        told["speedup_cpu"] = plain.cpu_s / max(fast.cpu_s, 1e-9)
    return told


def readable(content: dict[str, Any], times: dict[str, Any]) -> str:
    """The figures as people read them, each with how it was come by and over how many prompts."""
    untrained = content["untrained"]
    lines = [
        f"walked, the headline: {_tau(content)}, block {content['block_size']}, along the answers to "
        f"{content['num_requests']} prompts",
        f"decoded: {_decoded(content)}",
        *([f"decoded, untrained: {_tau(untrained)} over {untrained['num_requests']} prompts"] if untrained else []),
        *(f"  tie: {tie['id']} token {tie['position']}: {tie['between']}" for tie in content["ties"]),
        "walked, accepted per slot: " + " ".join(f"{share:.2f}" for share in content["accepted_frac"]),
        *(_family_line(name, found, "") for name, found in content["families"].items()),
        *(_family_line(name, found, " (apart)") for name, found in content["reported_apart"].items()),
    ]
    if "speedup_cpu" in times:
        lines.append(
            f"CPU time of decoding: plain / speculative {times['speedup_cpu']:.2f}, wall {times['speedup_wall']:.2f}"
        )
    return "\n".join(lines) + "\n"


def _tau(found: dict[str, Any]) -> str:
    return f"tau {found['tau']:.3f} (micro {found['tau_micro']:.3f})"


def _decoded(content: dict[str, Any]) -> str:
    """What decoding has shown: that nothing is lost, and what it gains."""
    found, count = content["decoded"], content["num_decoded"]
    gained = f"{_tau(found)}, {content['tokens_per_target_pass']:.2f} tokens a target pass, " if found else ""
    return f"{gained}over {count} of these prompts; lossless, {len(content['ties'])} ties"


def _family_line(name: str, found: dict[str, Any] | None, note: str) -> str:
    if found is None:
        return f"  {name}{note}: single-token answers only"
    return f"  walked, {name}{note}: {_tau(found)}, {found['num_requests']} prompts"
