"""`draftmill run`: the whole line from one recipe, room after room, and the closing summary.

Each room does what is missing and nothing else, so a run that was interrupted goes on, and a finished one only prints.
"""

import sys
from typing import Any

from pydantic import ValidationError

from draftmill.contracts.errors import RecipeError
from draftmill.rooms import ROOMS
from draftmill.settings.base import RoomSettings
from draftmill.settings.recipes import Recipe, load_recipe, readable, room_values
from draftmill.settings.run import RunSettings
from draftmill.storage.provenance import Stopwatch
from draftmill.summary import summarize_run

STAGES = (
    # A finished set stays as the later rooms have read it, its failed rows included.
    ("generate train", "generate", {"split": "train", "keep_finished": True}),
    ("generate held-out", "generate", {"split": "held-out", "keep_finished": True}),
    ("tokenize", "tokenize", {}),
    ("train", "train", {}),
    ("evaluate", "evaluate", {}),
    ("export", "export", {}),
    ("report", "report", {}),
)


def run(settings: RunSettings) -> dict[str, Any]:
    """Runs every room in order; returns the closing summary as one JSON-able dict."""
    watch = Stopwatch()
    recipe = load_recipe(settings.recipe)
    if settings.output:
        recipe = recipe.model_copy(update={"output": settings.output})
    # All settings are read before the first room runs, so that a bad key costs nothing.
    planned = {name: _room_settings(recipe, room, values) for name, room, values in STAGES}
    if settings.dry_run:
        return {"room": "run", "dry_run": True, "recipe": {n: s.model_dump(mode="json") for n, s in planned.items()}}
    cards = {}
    for name, room, _ in STAGES:
        _say(f"── {name} " + "─" * (70 - len(name)))
        cards[name] = ROOMS[room].story()(planned[name])
    lines, closing = summarize_run(cards, {name: _first_place(s) for name, s in planned.items()}, watch)
    _say("\n".join(lines))
    return closing


def _room_settings(recipe: Recipe, room: str, values: dict[str, Any]) -> RoomSettings:
    model = ROOMS[room].model()
    try:
        return model.model_validate(room_values(recipe, room, model, **values))
    except ValidationError as error:
        raise RecipeError(f"recipe table [{room}]: {readable(error)}") from error


def _first_place(settings: RoomSettings) -> str:
    """Where the room's output lies, or the first of several places."""
    output = settings.model_dump()["output"]
    return output if isinstance(output, str) else output[0]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
