"""What every room's settings share: frozen, no unknown keys, the line below a field is its help."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

_TRUTHS = {"true": True, "false": False}


def _as_meant(value: Any) -> Any:
    """A template that is told the text "false" takes it for true."""
    return _TRUTHS.get(value.lower(), value) if isinstance(value, str) else value


TemplateValue = Annotated[bool | int | float | str, BeforeValidator(_as_meant)]
"""What a chat template's keyword is given; true and false in any case are truth values, on a command line too."""


class Settings(BaseModel):
    """Base of every room's settings; unknown keys are refused, and a field's docstring is its `--help` text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **_kwargs: Any) -> None:
        # --help would keep the line ends of the source, and wrap between them.
        for field in cls.model_fields.values():
            field.description = field.description and " ".join(field.description.split())


def flag(key: str) -> str:
    """A setting as it is named on the command line."""
    return f"--{key.replace('_', '-')}"


def refuse_gpus_of_a_cpu(device: str, target_gpus: int) -> None:
    """ValueError where a target is to be spread over devices of which none is used."""
    if target_gpus > 1 and device == "cpu":
        raise ValueError(f"--target-gpus {target_gpus} counts CUDA devices, and --device cpu uses none")


_PLACES = {"input", "output", "target", "tokenizer", "checkpoint"}


class RoomSettings(Settings):
    """What every room's command takes beside its own settings."""

    dry_run: bool = False
    """Print the resolved recipe, inputs and outputs with counts and bytes, the work left, and stop."""

    @model_validator(mode="after")
    def _names_places(self) -> "RoomSettings":
        # An unset variable of a shell is enough: "" would mean the current folder.
        named = self.model_dump(include=_PLACES)
        if empty := [
            flag(name) for name, value in named.items() if value == "" or (isinstance(value, tuple) and "" in value)
        ]:
            raise ValueError(f"{', '.join(empty)}: empty; name a folder or URL (the current folder is .)")
        return self
