"""`draftmill export`: a checkpoint becomes a folder that vLLM, SGLang and PyPI dflash load.

In: a run, a checkpoint or an exported folder. Out: config.json, model.safetensors, README.md and draftmill.json (the
card), made under another name and renamed whole. Torch is imported late: a finished export is shown without it.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec

from draftmill.contracts.cards import EXPORT_CARD_FILE, Card, canonical_json
from draftmill.contracts.errors import RecipeError
from draftmill.export.card import Origin, card_of, find_finished, find_origin, readable, readme
from draftmill.settings.export import ExportSettings
from draftmill.storage.local import draft_folder, expanded, no_room, write_atomically
from draftmill.storage.provenance import Stopwatch

README_FILE = "README.md"


def run(settings: ExportSettings) -> dict[str, Any]:
    """Makes the folder unless it is there already; returns its card."""
    watch = Stopwatch()
    if "://" in settings.output:
        raise RecipeError(f"{settings.output}: engines load a drafter from a local folder; name one as --output")
    origin = find_origin(settings)
    output = expanded(settings.output).absolute()
    card = find_finished(output, origin.recipe)
    if settings.dry_run:
        return _preview(settings, origin, card)
    if card is None:
        with draft_folder(output) as draft:
            card = _make(draft, origin, watch)
            try:
                draft.rename(output)
            except OSError as error:  # another export took the name meanwhile
                if (there := find_finished(output, origin.recipe)) is None:
                    raise no_room(error, output) from error
                card = there
    sys.stderr.write(readable(output, card))
    return msgspec.to_builtins(card)


def _make(folder: Path, origin: Origin, watch: Stopwatch) -> Card:
    """Writes the files, checks them, and writes the card last."""
    import torch

    from draftmill.export.layout import write_layout
    from draftmill.model.checkpoint import load_drafter

    drafter = load_drafter(origin.checkpoint)
    write_layout(folder, drafter, {"bfloat16": torch.bfloat16, "float32": torch.float32}[origin.recipe["dtype"]])
    write_atomically(folder / README_FILE, readme(drafter.shape, origin).encode())
    card = card_of(folder, origin, drafter.shape, watch)
    write_atomically(folder / EXPORT_CARD_FILE, canonical_json(card))
    return card


def _preview(settings: ExportSettings, origin: Origin, card: Card | None) -> dict[str, Any]:
    files = sorted(path for path in origin.checkpoint.iterdir() if path.is_file())
    left = [] if card else [settings.output]
    sys.stderr.write(
        f"export reads {origin.checkpoint}; {'it is done' if card else f'{settings.output} is left to make'}\n"
    )
    return {
        "room": "export",
        "dry_run": True,
        "recipe": settings.model_dump(mode="json"),
        "inputs": [{"file": path.name, "bytes": path.stat().st_size} for path in files],
        "outputs": [settings.output],
        "left": left,
        "done": card is not None,
    }
