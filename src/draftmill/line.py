"""`draftmill run`: the whole line from one recipe. Rooms that need torch run as processes of their own."""

from typing import Any

from draftmill.settings.run import RunSettings


def run(settings: RunSettings) -> dict[str, Any]:
    """Runs every room in order; returns the closing summary."""
    raise NotImplementedError(settings)
