"""The page: a run's story through one autoescaped template, with nothing loaded from elsewhere."""

from pathlib import Path
from typing import Any

import msgspec
from jinja2 import ChainableUndefined, Environment

from draftmill.contracts.cards import Card
from draftmill.report.collect import Found, RunStory
from draftmill.report.curves import HEIGHT, WIDTH, Bar, Curve, bars, curve

TEMPLATE = Path(__file__).with_name("page.html.jinja")
CURVES = (
    ("loss", "loss"),
    ("acceptance estimate", "acceptance"),
    ("tau on held-out prompts, decoded", "tau"),
    ("tau on held-out answers, walked", "tau_walked"),
)


def page(story: RunStory) -> str:
    """The HTML of a run."""
    # Chainable: cards of different rooms have different figures, and a missing one is shown as nothing.
    environment = Environment(autoescape=True, undefined=ChainableUndefined, trim_blocks=True)
    environment.globals |= {"number": number, "pretty": pretty}
    evaluation = _content(story.of("evaluate"))
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        story=story,
        evaluation=evaluation,
        acceptance=acceptance_rows(evaluation) if evaluation else [],
        slots=slot_bars(evaluation) if evaluation else [],
        curves=run_curves(story),
        histogram=histogram_bars(_content(story.of("tokenize"))),
        width=WIDTH,
        height=HEIGHT,
    )


def run_curves(story: RunStory) -> list[Curve]:
    """The curves of every training run; each says which run it is of where there are several."""
    return [
        found
        for folder, metrics in story.metrics.items()
        for title, key in CURVES
        if (found := curve(title if len(story.metrics) == 1 else f"{folder}: {title}", metrics, key))
    ]


def _content(found: list[Found]) -> dict[str, Any] | None:
    return found[0].card.content if found else None


def number(value: Any) -> str:
    """A number with separators; nothing where there is none."""
    return f"{value:,}" if isinstance(value, int | float) else ""


def pretty(card: Card) -> str:
    """A card as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(card, order="sorted"), indent=2).decode()


def acceptance_rows(evaluation: dict[str, Any]) -> list[tuple[str, dict[str, Any] | None]]:
    """The lines of the acceptance table, walked where they do not say decoded: headline, each family, those apart."""
    return [
        ("headline, walked", evaluation),
        ("  of these decoded", evaluation.get("decoded")),
        *([("untrained, decoded", evaluation["untrained"])] if evaluation.get("untrained") else []),
        *evaluation.get("families", {}).items(),
        *((f"{family} (apart)", found) for family, found in evaluation.get("reported_apart", {}).items()),
    ]


def slot_bars(evaluation: dict[str, Any]) -> list[Bar]:
    """The share of cycles that accepted each draft slot."""
    return bars([(f"slot {slot}", share, f"{share:.2f}") for slot, share in enumerate(evaluation["accepted_frac"], 1)])


def histogram_bars(content: dict[str, Any] | None) -> list[Bar]:
    """Samples by their number of supervised tokens."""
    found = (content or {}).get("supervised_histogram", [])
    return bars([(f"{b['from']} to {b['to']}", b["samples"], f"{b['samples']:,}") for b in found])
