"""The story of `draftmill generate`: plan, have missing parts answered, judge and publish each, close with the card."""

import asyncio
import logging
from typing import Any

import msgspec

from draftmill.contracts.cards import Card, make_card
from draftmill.generate.batches import Answering
from draftmill.generate.gate import judge, judge_whole
from draftmill.generate.part import AnswerFigures, OpenPart
from draftmill.generate.plan import Blueprint, describe, draw_up, num_engines
from draftmill.progress import Progress
from draftmill.serving.process import engines
from draftmill.serving.protocol import GREEDY
from draftmill.settings.generate import GenerateSettings
from draftmill.storage.provenance import Stopwatch, provenance
from draftmill.storage.sets import SetWriter, open_set_writer

logger = logging.getLogger(__name__)


def run(settings: GenerateSettings) -> dict[str, Any]:
    """Answers the prompts into every output; returns the card, or what a dry run tells."""
    watch = Stopwatch()
    blueprint = draw_up(settings)
    if settings.dry_run:
        return describe(blueprint, settings)
    writer = open_set_writer(settings.output, blueprint.plan)
    card = writer.card()
    if card is None:
        asyncio.run(_make_missing(writer, blueprint, settings))
        card = _finish(writer, blueprint, settings, watch)
    return msgspec.to_builtins(card)


async def _make_missing(writer: SetWriter, blueprint: Blueprint, settings: GenerateSettings) -> None:
    """Has every part answered that some output lacks; each is judged, then published."""
    missing = {part.name for part in writer.missing()}
    parts = [part for part in blueprint.prompts.parts if part.name in missing]
    if not parts:
        return
    num_rows = sum(len(part.prompts) for part in parts)

    def close(part: OpenPart) -> None:
        record, data = part.record(writer.plan.hash, GREEDY.explicit(settings.max_new_tokens))
        judge([record], settings, record.name)
        writer.publish(record, data)

    count = num_engines(settings, blueprint, num_rows)
    logger.info("starting %d engines of %s for %d rows", count, settings.target, num_rows)
    async with engines(blueprint.folder, count) as ready:
        progress = Progress("generate", total=num_rows, unit="rows")
        answering = Answering(blueprint.chat, blueprint.limits, close, progress.advance)
        await answering.answer(parts, ready, settings.request_timeout_s)


def _finish(writer: SetWriter, blueprint: Blueprint, settings: GenerateSettings, watch: Stopwatch) -> Card:
    """Judges the whole, then publishes the card."""
    made = writer.records()
    records = tuple(made[part.name] for part in writer.plan.parts)
    judge_whole(records, settings)
    figures = sum((AnswerFigures.read(record.stats) for record in records), AnswerFigures())
    content = {
        **figures.as_content(),
        "split": settings.split,
        "rows_of_other_split": blueprint.prompts.num_other,
        "tokenizer_hash": blueprint.chat.tokenizer_hash,
        "template_hash": blueprint.chat.template_hash,
    }
    return writer.finish(
        make_card("generate", writer.plan, records, content, {**provenance(watch), "target": settings.target})
    )
