"""The closing summary of a run: rows and tokens per stage, drops by reason, acceptance, where all lies."""

from typing import Any

from draftmill.settings.recipes import Recipe
from draftmill.storage.provenance import Stopwatch


def summarize_run(cards: dict[str, Any], recipe: Recipe, watch: Stopwatch) -> tuple[list[str], dict[str, Any]]:
    """Lines for the terminal, and the closing JSON object."""
    raise NotImplementedError((cards, recipe, watch))
