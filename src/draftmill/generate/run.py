"""The story of `draftmill generate`: plan, have missing parts answered, judge and publish each, close with the card."""

import asyncio
import logging
from typing import Any

import msgspec

from draftmill.contracts.cards import Card
from draftmill.contracts.errors import ServingError
from draftmill.generate.batches import answer_in_process
from draftmill.generate.desk import Desk, open_desk
from draftmill.generate.flow import answer_served
from draftmill.generate.plan import describe, draw_up
from draftmill.settings.generate import GenerateSettings
from draftmill.storage.provenance import Stopwatch

logger = logging.getLogger(__name__)


def run(settings: GenerateSettings) -> dict[str, Any]:
    """Answers the prompts into every output; returns the card, or what a dry run tells."""
    watch = Stopwatch()
    blueprint = draw_up(settings)
    if settings.dry_run:
        return describe(blueprint)
    with open_desk(blueprint) as desk, desk.writer.telling_refusal():
        card = desk.finished() or _made(desk, watch)
    return msgspec.to_builtins(card)


def _made(desk: Desk, watch: Stopwatch) -> Card:
    """The card, once every part is answered. A finished set stays one where no engine is there for its failed rows."""
    desk.writer.forget_refusal()
    left = desk.left()
    if not any(part.num_asked for part in left):
        desk.close_unasked(left)
        return desk.finish(watch, {})
    answer = answer_served if desk.blueprint.settings.endpoint else answer_in_process
    try:
        engines = asyncio.run(answer(desk, left))
    except ServingError as error:
        if (before := desk.writer.card()) is None:
            raise
        logger.warning("the set is finished, but its failed rows could not be asked again: %s", error)
        return before
    return desk.finish(watch, engines)
