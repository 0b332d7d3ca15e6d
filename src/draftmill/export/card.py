"""The card of an exported folder: where it came from, what it holds, and whether it is whole still. No torch."""

from pathlib import Path
from typing import Any

import msgspec

from draftmill.contracts.cards import Card, content_hash
from draftmill.contracts.errors import RecipeError, StorageError
from draftmill.export.engines import serving_commands
from draftmill.model.shape import DrafterShape
from draftmill.settings.export import ExportSettings
from draftmill.storage.checkpoints import CONFIG_FILE, MARKER_FILE, WEIGHTS_FILE, Marker
from draftmill.storage.provenance import Stopwatch, provenance
from draftmill.storage.store import sha256_of

CARD_FILE = "draftmill.json"


class _Content(msgspec.Struct):
    """What a card is looked at for."""

    recipe: dict[str, Any]
    step: int | None
    files: list[dict[str, Any]]
    block_size: int


def recipe_of(settings: ExportSettings, checkpoint: Path) -> dict[str, Any]:
    """What fixes an export: the checkpoint's bytes, the number format, the layout."""
    source = {name: sha256_of(checkpoint / name) for name in (CONFIG_FILE, WEIGHTS_FILE)}
    return {"source": source, "dtype": settings.dtype, "layout": settings.layout}


def step_of(checkpoint: Path) -> int | None:
    """The optimizer step the checkpoint stands at, where it says."""
    marker = checkpoint / MARKER_FILE
    return msgspec.json.decode(marker.read_bytes(), type=Marker).step if marker.is_file() else None


def card_of(folder: Path, recipe: dict[str, Any], step: int | None, shape: DrafterShape, watch: Stopwatch) -> Card:
    """The card of the files that lie in `folder`."""
    files = [
        {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
        if path.name != CARD_FILE
    ]
    content = {
        "recipe": recipe,
        "step": step,
        "files": files,
        "block_size": shape.block_size,
        "num_speculative_tokens": shape.block_size - 1,
        "tap_ids": list(shape.tap_ids),
        "mask_id": shape.mask_id,
        "sample_from_anchor": False,
        "serving": serving_commands("FOLDER", shape.block_size),
    }
    return Card(room="export", content=content, content_hash=content_hash(content), run=provenance(watch))


def find_finished(output: Path, recipe: dict[str, Any]) -> Card | None:
    """The card of an export of this recipe that lies at `output` already; None where nothing does.

    RecipeError where something else lies there, StorageError where the export was changed since.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not (output / CARD_FILE).is_file():
        raise RecipeError(f"{output} is there already and no export of draftmill: name another --output")
    card = _card_in(output)
    there = card.content["recipe"]
    if there != recipe:
        changed = ", ".join(key for key in recipe if there.get(key) != recipe[key])
        raise RecipeError(
            f"{output} already holds another export (step {card.content['step']}; {changed} differ): name another "
            "--output, or remove that folder"
        )
    for file in card.content["files"]:
        path = output / file["file"]
        if not path.is_file() or sha256_of(path) != file["sha256"]:
            raise StorageError(f"{path} is missing or was changed since it was exported: remove {output}, run again")
    return card


def _card_in(output: Path) -> Card:
    try:
        card = msgspec.json.decode((output / CARD_FILE).read_bytes(), type=Card)
        msgspec.convert(card.content, _Content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError(
            f"{output / CARD_FILE} was cut or changed ({error}): remove {output} and run again, or name another folder"
        ) from error
    return card


def readable(output: Path, card: Card) -> str:
    """Where the export lies and how it is served, as people read it."""
    content = card.content
    lines = [f"{output}: step {content['step']}, {content['recipe']['dtype']}, block {content['block_size']}"]
    lines += [f"  {file['file']}: {file['bytes']:,} bytes" for file in content["files"]]
    lines += [
        f"{engine}: {command}" for engine, command in serving_commands(str(output), content["block_size"]).items()
    ]
    return "\n".join(lines) + "\n"


def readme(shape: DrafterShape, step: int | None) -> str:
    """The model card beside the weights."""
    commands = "\n".join(
        f"{engine}:\n\n    {command}\n" for engine, command in serving_commands("FOLDER", shape.block_size).items()
    )
    trained = "" if step is None else f", after {step:,} optimizer steps"
    return f"""# DFlash drafter

Drafts for a target of {shape.num_target_layers} layers and hidden size {shape.hidden_size}{trained}. It proposes
{shape.block_size - 1} tokens at a time (block {shape.block_size}, the known anchor included) from the residual streams
after the target's layers {", ".join(map(str, shape.tap_ids))} (0-based), and reads token {shape.mask_id} as MASK.
Embedding and output head are the target's own and are not in this folder. Made by draftmill; `draftmill.json` says
from which checkpoint. Algorithm: DFlash, arXiv 2602.06036.

Serve it with the target it was trained for (TARGET), FOLDER being this folder:

{commands}"""
