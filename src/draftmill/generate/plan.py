"""The plan of a completions set: the settings, prompts and target that it depends on, frozen before any is asked."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from draftmill.chat.chat import Chat, open_chat
from draftmill.contracts.cards import Plan, PlannedPart
from draftmill.contracts.errors import InputError, RecipeError
from draftmill.generate.exclusion import Exclusion
from draftmill.generate.manner import Manner, sampling_of, wanted_thinking
from draftmill.generate.prompts import Reading
from draftmill.generate.survey import Survey, survey
from draftmill.serving.protocol import GREEDY
from draftmill.settings.generate import GenerateSettings
from draftmill.settings.workers import usable_memory_bytes
from draftmill.storage.models import CONFIG_FILE, fingerprint, locate, text_config, window_tokens
from draftmill.storage.row_files import RowFile, find_row_files
from draftmill.storage.sets import Standing, look_at

# Part of the plan: raised when the same prompts and settings come to give other rows.
FORMAT = 3
# What an engine takes beside its weights in float32: libraries, cache of a batch, scratch.
ENGINE_BYTES = 1 << 30
_BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2, "float16": 2}
# Settings that change the rows, beside inputs, target, template and sampling.
_RECIPE = (
    *("split", "held_out_frac", "turns", "import_answers", "exclude_tokens", "max_new_tokens", "on_length"),
    *("on_repetition", "cycle_tokens", "cycle_times", "cycle_run_tokens", "cycle_run_frac", "compression", "part_rows"),
)


@dataclass(frozen=True)
class Blueprint:
    """All that is known before the first prompt is asked. `manner` takes the window from the target's configuration."""

    settings: GenerateSettings
    folder: Path
    manner: Manner
    reading: Reading
    survey: Survey
    licences: dict[str, str]
    """By the names of the prompt sets; those without one are left out."""
    plan: Plan


def draw_up(settings: GenerateSettings) -> Blueprint:
    """Finds prompts and target; InputError or RecipeError where one is missing or they do not fit each other."""
    files = find_row_files(settings.input)
    licences = _licences(settings, [file.file.key for file in files])
    folder = locate(settings.tokenizer or settings.target, weights=not settings.endpoint)
    chat = open_chat(folder)
    evaluation = find_row_files(settings.exclude)
    manner = Manner(
        chat=chat,
        settings=settings,
        exclusion=Exclusion(evaluation, chat, settings.exclude_tokens) if evaluation else None,
        window=_window(settings, folder),
        thinks=wanted_thinking(chat, settings),
    )
    reading = Reading(settings.turns, settings.import_answers)
    found = survey(files, settings, reading)
    plan = Plan(
        room="generate",
        recipe=_recipe(settings, folder, chat, evaluation),
        inputs=found.inputs,
        parts=tuple(PlannedPart(name=span.name, inputs=found.pieces(span)) for span in found.spans),
    )
    return Blueprint(settings, folder, manner, reading, found, licences, plan)


def _licences(settings: GenerateSettings, names: list[str]) -> dict[str, str]:
    pairs = [given.partition("=") for given in settings.licence]
    for name, equals, licence in pairs:
        if not (equals and licence) or name not in names:
            raise RecipeError(
                f"--licence {name}{equals}{licence}: give NAME=LICENCE, NAME being one of {', '.join(names)}"
            )
    return {name: licence for name, _, licence in pairs}


def _window(settings: GenerateSettings, folder: Path) -> int | None:
    """Tokens of the target's window, by its config.json; a server may know more."""
    if settings.endpoint and not (folder / CONFIG_FILE).is_file():
        return None
    found = window_tokens(folder)
    if settings.endpoint:
        return found
    if found is None:
        raise InputError(f"{folder / CONFIG_FILE} says no max_position_embeddings: the target's window is unknown")
    if settings.max_new_tokens >= found:
        raise RecipeError(
            f"--max-new-tokens {settings.max_new_tokens:,} leaves no room for a prompt in the target's window of "
            f"{found:,} tokens: lower it"
        )
    return found


def _recipe(settings: GenerateSettings, folder: Path, chat: Chat, evaluation: tuple[RowFile, ...]) -> dict[str, Any]:
    if settings.endpoint:
        target, sampling = settings.target, sampling_of(settings, settings.seed)
    else:
        target, sampling = fingerprint(folder), GREEDY
    return {
        "format": FORMAT,
        "back_end": "served" if settings.endpoint else "in-process",
        "target": target,
        "sampling": msgspec.to_builtins(sampling),
        "batch_rows": None if settings.endpoint else settings.batch_rows,
        "tokenizer_hash": chat.tokenizer_hash,
        "template_hash": chat.template_hash,
        "special_tokens": chat.special_tokens,
        "template_kwargs": dict(settings.switches),
        "exclude": [msgspec.to_builtins(file.file) for file in evaluation],
        **settings.model_dump(mode="json", include=set(_RECIPE)),
    }


def num_engines(blueprint: Blueprint, num_rows: int) -> int:
    """Engines for `num_rows` rows: no more than there are workers, batches, or room in memory; at least 1."""
    settings = blueprint.settings
    files = list(blueprint.folder.glob("*.safetensors"))
    stored = _BYTES_PER_WEIGHT.get(str(text_config(blueprint.folder).get("dtype")), 2)
    weights_bytes = sum(file.stat().st_size for file in files) * 4 // stored
    fitting = usable_memory_bytes() // (weights_bytes + ENGINE_BYTES)
    return max(1, min(settings.workers, fitting, -(-num_rows // settings.batch_rows)))


def describe(blueprint: Blueprint) -> dict[str, Any]:
    """What a dry run tells, on stderr for people and as the return value for machines; nothing is written."""
    settings, found = blueprint.settings, blueprint.survey
    standing = look_at(settings.output, blueprint.plan)
    names = {part.name for part in standing.left}
    left = [span for span in found.spans if span.name in names]
    num_again = _num_asked_again(settings, standing)
    num_left = sum(span.num_asked for span in left) + num_again
    if settings.endpoint:
        engines = f"{', '.join(settings.endpoint)}, where the target is {settings.served_name or settings.target!r}"
    else:
        engines = f"{num_engines(blueprint, num_left)} engines of the target in {blueprint.folder}"
    sys.stderr.write(
        f"generate reads {found.num_rows:,} rows of split {settings.split!r} from {len(found.files):,} files "
        f"({sum(f.size for f in found.inputs):,} bytes); {', '.join(settings.output)}: {standing.words}"
        f"{f'; {num_left:,} prompts are left to answer, by {engines}' if num_left else ''}\n"
    )
    return {
        "room": "generate",
        "dry_run": True,
        "recipe": settings.model_dump(mode="json"),
        "inputs": msgspec.to_builtins(found.inputs),
        "outputs": list(settings.output),
        "left": [span.name for span in left],
        "done": standing.is_done and not num_again,
    }


def _num_asked_again(settings: GenerateSettings, standing: Standing) -> int:
    """Rows of a finished set that failed: a rerun asks for them, unless the set is to stay as it is."""
    return 0 if standing.card is None or settings.keep_finished else sum(standing.card.content["failed"].values())
