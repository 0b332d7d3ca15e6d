"""The plan of a completions set: the settings, prompts and target its bytes depend on, frozen before any is asked."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from draftmill.chat.chat import Chat, open_chat
from draftmill.contracts.cards import Plan, PlannedPart
from draftmill.contracts.errors import InputError, RecipeError
from draftmill.generate.part import Limits
from draftmill.generate.prompts import PromptSet, read_prompts
from draftmill.serving.protocol import GREEDY
from draftmill.settings.generate import GenerateSettings
from draftmill.settings.workers import usable_memory_bytes
from draftmill.storage.models import fingerprint, locate
from draftmill.storage.sets import missing_parts

# Part of the plan: raised when the same prompts and settings come to give other rows.
FORMAT = 1
# What an engine takes beside its weights in float32: libraries, cache of a batch, scratch.
ENGINE_BYTES = 1 << 30
_BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Blueprint:
    """All that is known before the first prompt is asked."""

    folder: Path
    chat: Chat
    prompts: PromptSet
    limits: Limits
    plan: Plan


def draw_up(settings: GenerateSettings) -> Blueprint:
    """Finds prompts and target; InputError or RecipeError where one is missing or they do not fit each other."""
    prompts = read_prompts(settings)
    folder = locate(settings.target)
    chat = open_chat(folder)
    limits = _limits(settings, _window(folder))
    plan = Plan(
        room="generate",
        recipe=_recipe(settings, folder, chat),
        inputs=prompts.files,
        parts=tuple(PlannedPart(name=p.name, inputs=tuple(q.row.id for q in p.prompts)) for p in prompts.parts),
    )
    return Blueprint(folder, chat, prompts, limits, plan)


def _window(folder: Path) -> int:
    """Tokens of the target's window, by its config.json (a wrapper keeps it in text_config)."""
    config = _config(folder)
    found = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    if not isinstance(found, int):
        raise InputError(f"{folder / 'config.json'} says no max_position_embeddings: the target's window is unknown")
    return found


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"{folder} holds no config.json: it is not a Hugging Face model folder")
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not a JSON object: {error}; save the target again, or fetch it again") from error


def _limits(settings: GenerateSettings, window: int) -> Limits:
    if settings.max_new_tokens >= window:
        raise RecipeError(
            f"max_new_tokens {settings.max_new_tokens:,} leaves no room for a prompt in the target's window of "
            f"{window:,} tokens: lower --max-new-tokens"
        )
    return Limits(
        max_prompt_tokens=window - settings.max_new_tokens,
        max_new_tokens=settings.max_new_tokens,
        batch_rows=settings.batch_rows,
        keeps_cut=settings.on_length == "keep",
    )


def _recipe(settings: GenerateSettings, folder: Path, chat: Chat) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "target": fingerprint(folder),
        "tokenizer_hash": chat.tokenizer_hash,
        "template_hash": chat.template_hash,
        "special_tokens": chat.special_tokens,
        "split": settings.split,
        "held_out_frac": settings.held_out_frac,
        "on_length": settings.on_length,
        "batch_rows": settings.batch_rows,
        "part_rows": settings.part_rows,
        "sampling": GREEDY.explicit(settings.max_new_tokens),
    }


def num_engines(settings: GenerateSettings, blueprint: Blueprint, num_rows: int) -> int:
    """Engines for `num_rows` rows: no more than there are workers, batches, or room in memory; at least 1."""
    files = list(blueprint.folder.glob("*.safetensors"))
    stored = _BYTES_PER_WEIGHT.get(str(_config(blueprint.folder).get("dtype")), 2)
    weights_bytes = sum(file.stat().st_size for file in files) * 4 // stored
    fitting = usable_memory_bytes() // (weights_bytes + ENGINE_BYTES)
    return max(1, min(settings.workers, fitting, -(-num_rows // settings.batch_rows)))


def describe(blueprint: Blueprint, settings: GenerateSettings) -> dict[str, Any]:
    """What a dry run tells, on stderr for people and as the return value for machines; nothing is written."""
    left = {part.name: len(part.inputs) for part in missing_parts(settings.output, blueprint.plan)}
    files = blueprint.prompts.files
    sys.stderr.write(
        f"generate reads {sum(len(p.inputs) for p in blueprint.plan.parts):,} prompts of split {settings.split!r} from "
        f"{len(files):,} files ({sum(f.size for f in files):,} bytes); {len(left):,} of {len(blueprint.plan.parts):,} "
        f"parts ({sum(left.values()):,} prompts) are left to answer in {', '.join(settings.output)}, by "
        f"{num_engines(settings, blueprint, sum(left.values()))} engines of the target in {blueprint.folder}\n"
    )
    return {
        "room": "generate",
        "dry_run": True,
        "recipe": settings.model_dump(mode="json"),
        "inputs": msgspec.to_builtins(files),
        "outputs": list(settings.output),
        "left": list(left),
    }
