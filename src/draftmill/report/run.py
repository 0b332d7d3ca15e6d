"""`draftmill report`: one HTML page of a run. In: the cards and metrics below its folder. Out: a file. No torch."""

import sys
from typing import Any

from draftmill.contracts.errors import RecipeError
from draftmill.report.collect import RunStory, collect
from draftmill.report.page import page
from draftmill.settings.report import ReportSettings
from draftmill.storage.local import expanded
from draftmill.storage.store import OBJECT_SCHEMES, open_store


def run(settings: ReportSettings) -> dict[str, Any]:
    """Writes the page and returns what it tells of."""
    story = collect(open_store(settings.input))
    told = {
        "room": "report",
        "output": settings.output,
        "found": {found.folder: found.card.room for found in story.found},
        "missing": list(story.missing),
        "steps": sum(map(len, story.metrics.values())),
    }
    if settings.dry_run:
        sys.stderr.write(f"report reads {len(story.found)} cards below {story.url} and writes {settings.output}\n")
        return {**told, "dry_run": True, "recipe": settings.model_dump(mode="json"), "left": [settings.output]}
    size = write_page(settings.output, story)
    sys.stderr.write(f"{settings.output}: {size:,} bytes\n")
    return {**told, "bytes": size}


def write_page(url: str, story: RunStory) -> int:
    """Writes the page, whole or not at all; returns its bytes."""
    folder, _, name = (url if url.startswith(OBJECT_SCHEMES) else str(expanded(url).absolute())).rpartition("/")
    if not name:
        raise RecipeError(f"{url}: name the HTML file to write")
    data = page(story).encode()
    open_store(folder, create=True).put(name, data)
    return len(data)
