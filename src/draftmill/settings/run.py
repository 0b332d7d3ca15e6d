"""Settings of `draftmill run`."""

from draftmill.settings.base import RoomSettings


class RunSettings(RoomSettings):
    """The whole line from one recipe."""

    recipe: str
    """The recipe: a TOML file with target, prompts, output, and a table per room."""
    output: tuple[str, ...] = ()
    """Folders that receive the run, instead of the recipe's; may be given twice (local and s3://)."""
