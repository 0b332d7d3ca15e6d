"""The card of an exported folder: where it came from, what it holds, and whether it is whole still. No torch."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from draftmill.contracts.cards import EXPORT_CARD_FILE, Card, content_hash
from draftmill.contracts.errors import RecipeError, StorageError
from draftmill.export.engines import serving_commands
from draftmill.model.shape import DrafterShape
from draftmill.settings.export import ExportSettings
from draftmill.storage.checkpoints import CONFIG_FILE, MARKER_FILE, WEIGHTS_FILE, Marker, find_checkpoint
from draftmill.storage.models import PACKAGE_SCHEME
from draftmill.storage.origin import TrainedFor, trained_for
from draftmill.storage.provenance import Stopwatch, provenance
from draftmill.storage.store import sha256_of

# What stands in a serving command where no name is known by which an engine finds the target.
TARGET = "TARGET"


@dataclass(frozen=True)
class Origin:
    """What an export is made of, and where that comes from, as far as the checkpoint and its run say."""

    checkpoint: Path
    """The folder with its files."""
    recipe: dict[str, Any]
    """What fixes the export: the checkpoint's bytes, the number format, the layout."""
    step: int | None
    """The optimizer step the checkpoint stands at."""
    target: TrainedFor | None


class _Content(msgspec.Struct):
    """What a card is looked at for."""

    recipe: dict[str, Any]
    step: int | None
    files: list[dict[str, Any]]
    block_size: int
    target: TrainedFor | None = None


def find_origin(settings: ExportSettings) -> Origin:
    """The checkpoint to export, its files checked."""
    checkpoint = find_checkpoint(settings.checkpoint)
    source = {name: sha256_of(checkpoint / name) for name in (CONFIG_FILE, WEIGHTS_FILE)}
    recipe = {"source": source, "dtype": settings.dtype, "layout": settings.layout}
    return Origin(checkpoint, recipe, _step_of(checkpoint), trained_for(settings.checkpoint))


def _step_of(checkpoint: Path) -> int | None:
    """What the marker of a checkpoint says, or the card of an export."""
    if (marker := checkpoint / MARKER_FILE).is_file():
        return msgspec.json.decode(marker.read_bytes(), type=Marker).step
    if (checkpoint / EXPORT_CARD_FILE).is_file():
        with suppress(StorageError):
            return _card_in(checkpoint).content["step"]
    return None


def served_name(target: TrainedFor | None) -> str:
    """What engines are told to load before the drafter; TARGET where they could not load it by the name it has."""
    name = None if target is None else target.name
    return TARGET if name is None or name.startswith(PACKAGE_SCHEME) else name


def card_of(folder: Path, origin: Origin, shape: DrafterShape, watch: Stopwatch) -> Card:
    """The card of the files that lie in `folder`."""
    files = [
        {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
        if path.name != EXPORT_CARD_FILE
    ]
    content = {
        "recipe": origin.recipe,
        "step": origin.step,
        "target": msgspec.to_builtins(origin.target),
        "files": files,
        "block_size": shape.block_size,
        "num_speculative_tokens": shape.block_size - 1,
        "tap_ids": list(shape.tap_ids),
        "mask_id": shape.mask_id,
        "sample_from_anchor": False,
        "serving": serving_commands(served_name(origin.target), "FOLDER", shape.block_size),
    }
    return Card(room="export", content=content, content_hash=content_hash(content), run=provenance(watch))


def find_finished(output: Path, recipe: dict[str, Any]) -> Card | None:
    """The card of an export of this recipe that lies at `output` already; None where nothing does.

    RecipeError where something else lies there, StorageError where the export was changed since.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not (output / EXPORT_CARD_FILE).is_file():
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
        card = msgspec.json.decode((output / EXPORT_CARD_FILE).read_bytes(), type=Card)
        msgspec.convert(card.content, _Content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError(
            f"{output / EXPORT_CARD_FILE} was cut or changed ({error}): remove {output} and run again, or name another "
            "folder"
        ) from error
    return card


def readable(output: Path, card: Card) -> str:
    """Where the export lies and how it is served, as people read it."""
    content = msgspec.convert(card.content, _Content)
    step = "" if content.step is None else f"step {content.step:,}, "
    lines = [f"{output}: {step}{content.recipe['dtype']}, block {content.block_size}"]
    lines += [f"  {file['file']}: {file['bytes']:,} bytes" for file in content.files]
    commands = serving_commands(served_name(content.target), str(output), content.block_size)
    lines += [f"{engine}: {command}" for engine, command in commands.items()]
    return "\n".join(lines) + "\n"


def readme(shape: DrafterShape, origin: Origin) -> str:
    """The model card beside the weights."""
    name = served_name(origin.target)
    told = serving_commands(name, "FOLDER", shape.block_size)
    commands = "\n".join(f"{engine}:\n\n    {command}\n" for engine, command in told.items())
    trained = "" if origin.step is None else f", after {origin.step:,} optimizer steps"
    stand_ins = "FOLDER is this folder" + (f", {TARGET} that model" if name == TARGET else "")
    return f"""# DFlash drafter

Drafts for a target of {shape.num_target_layers} layers and hidden size {shape.hidden_size}{trained}. It proposes
{shape.block_size - 1} tokens at a time (block {shape.block_size}, the known anchor included) from the residual streams
after the target's layers {", ".join(map(str, shape.tap_ids))} (0-based), and reads token {shape.mask_id} as MASK.
Embedding and output head are the target's own and are not in this folder. Made by draftmill; `draftmill.json` says
from which checkpoint. Algorithm: DFlash, arXiv 2602.06036.

{_whose(origin.target)} In these commands {stand_ins}:

{commands}"""


def _whose(target: TrainedFor | None) -> str:
    if target is None:
        return "Which target it was trained for was not recorded beside the checkpoint; it serves no other."
    name = "a target whose name was not recorded" if target.name is None else f"`{target.name}`"
    return (
        f"It was trained for {name} and serves no other (draftmill's fingerprint of that one:\n{target.fingerprint})."
    )
