"""What every room's settings share: frozen, no unknown keys, the line below a field is its help."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of every room's settings; unknown keys are refused, and a field's docstring is its `--help` text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **_kwargs: Any) -> None:
        # --help would keep the line ends of the source, and wrap between them.
        for field in cls.model_fields.values():
            field.description = field.description and " ".join(field.description.split())


class RoomSettings(Settings):
    """What every room's command takes beside its own settings."""

    dry_run: bool = False
    """Print the resolved recipe, inputs and outputs with counts and bytes, the work left, and stop."""
