"""The plan of a tokenized set: the settings and files its bytes depend on, frozen before the first part is made."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftmill.chat.borders import find_borders
from draftmill.chat.chat import Chat, open_chat
from draftmill.contracts.cards import Plan, PlannedPart
from draftmill.contracts.errors import InputError, RecipeError
from draftmill.contracts.rows import JSONL_SUFFIXES
from draftmill.settings.recipes import refuse_unknown
from draftmill.settings.tokenize import TokenizeSettings
from draftmill.storage.local import expanded
from draftmill.storage.models import locate
from draftmill.tokenize.pieces import PartInputs, cut_parts
from draftmill.tokenize.rows import RowMakerSpec
from draftmill.tokenize.source import Source, open_source

# Part of the plan: raised when the same rows and settings come to give other samples or other bytes.
FORMAT = 4


@dataclass(frozen=True)
class Blueprint:
    """All that is known before the first row is read."""

    settings: TokenizeSettings
    rows: RowMakerSpec
    """What makes samples of rows."""
    origin: dict[str, Any]
    """What the card tells of where the samples come from."""
    source: Source
    plan: Plan
    parts: tuple[PartInputs, ...]
    """What each part is made of, in the plan's order."""


def draw_up(settings: TokenizeSettings) -> Blueprint:
    """Finds tokenizer, template and input; InputError where one is missing, empty, or made for another target."""
    folder = locate(settings.tokenizer, weights=False)
    chat = open_chat(folder, settings.template_date)
    refuse_unknown(settings.template_kwargs, chat.reading.keywords, f"chat template of {settings.tokenizer}")
    borders = find_borders(chat, settings.template_kwargs)
    if chat.clock.was_asked and settings.template_date is None:
        raise RecipeError(
            f"the chat template of {settings.tokenizer} prints the day: name the one on which answers were generated "
            "(--template-date 2026-11-30), so that prompts are those that the target saw, today and in any rerun"
        )
    source = open_source(settings.input)
    made_with = source.card.get("tokenizer_hash", chat.tokenizer_hash)
    if made_with != chat.tokenizer_hash:
        raise InputError(
            f"{settings.input} was generated with another tokenizer ({made_with[:12]}…) than {settings.tokenizer} "
            f"({chat.tokenizer_hash[:12]}…): name the target that made it"
        )
    _refuse_output_in_input(settings, source)
    parts = cut_parts(source.pieces(settings.part_bytes), settings.part_bytes)
    if not parts:
        raise InputError(f"{settings.input}: all {len(source.files)} files are empty")
    plan = Plan(
        room="tokenize",
        recipe=_recipe(settings, chat, source),
        inputs=source.files,
        parts=tuple(PlannedPart(name=part.name, inputs=tuple(p.name for p in part.pieces)) for part in parts),
    )
    # The tokenizer itself is not kept: a worker's is its own, and it takes 200 MB.
    origin = {
        "tokenizer_hash": chat.tokenizer_hash,
        "template_hash": chat.template_hash,
        "borders": asdict(borders),
        "input_plan": source.card.get("plan"),
    }
    return Blueprint(settings, _rows(folder, settings), origin, source, plan, parts)


def _refuse_output_in_input(settings: TokenizeSettings, source: Source) -> None:
    """What is written must not be read by the next run of the same command."""
    if settings.input.endswith(JSONL_SUFFIXES):
        return
    folder = source.store.folder
    read = source.store.url if folder is None else str(folder.resolve())
    for url in settings.output:
        written = url.rstrip("/") if "://" in url else str(expanded(url).resolve())
        if f"{written}/".startswith(f"{read}/"):
            raise RecipeError(f"--output {url} lies in the input {settings.input}: name a folder outside of it")


def _rows(folder: Path, settings: TokenizeSettings) -> RowMakerSpec:
    told = (settings.template_kwargs, settings.template_date)
    return RowMakerSpec(folder, settings.turns, settings.max_tokens, *told, settings.mask_id)


def _recipe(settings: TokenizeSettings, chat: Chat, source: Source) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "turns": settings.turns,
        "template_kwargs": settings.template_kwargs,
        "template_date": None if settings.template_date is None else settings.template_date.isoformat(),
        "max_tokens": settings.max_tokens,
        "mask_id": settings.mask_id,
        "part_bytes": settings.part_bytes,
        "tokenizer_hash": chat.tokenizer_hash,
        "template_hash": chat.template_hash,
        "special_tokens": chat.special_tokens,
        "input_plan": source.card.get("plan"),
    }
