"""The story of `draftmill tokenize`: plan, make what is missing, judge and publish each part, close with the card."""

import asyncio
from typing import Any

import msgspec

from draftmill.contracts.cards import Card, count_reasons, make_card, told_reasons
from draftmill.contracts.errors import InputError
from draftmill.settings.tokenize import TokenizeSettings
from draftmill.storage.provenance import Stopwatch, provenance
from draftmill.storage.sets import SetWriter, open_set_writer
from draftmill.tokenize.figures import as_content, figures_of, total
from draftmill.tokenize.gate import judge
from draftmill.tokenize.histogram import show
from draftmill.tokenize.jsonl import write_jsonl
from draftmill.tokenize.making import make_missing
from draftmill.tokenize.picture import PICTURE_FILE, picture
from draftmill.tokenize.plan import Blueprint, describe, draw_up
from draftmill.tokenize.shards import datasets_files

# A second round makes what another run, that lost this folder to ours, overwrote before it noticed.
_ROUNDS = 2


def run(settings: TokenizeSettings) -> dict[str, Any]:
    """Tokenizes the input into every output; returns the card, or what a dry run tells."""
    watch = Stopwatch()
    blueprint = draw_up(settings)
    if settings.dry_run:
        return describe(blueprint)
    writer = open_set_writer(settings.output, blueprint.plan)
    card = writer.card()
    if card is None:
        for _ in range(_ROUNDS):
            if writer.missing():
                asyncio.run(make_missing(writer, blueprint, settings))
        card = _finish(writer, blueprint, settings, watch)
    if "jsonl" in settings.also:
        for url in settings.output:
            write_jsonl(url)
    return msgspec.to_builtins(card)


def _finish(writer: SetWriter, blueprint: Blueprint, settings: TokenizeSettings, watch: Stopwatch) -> Card:
    """Judges the whole, then publishes what datasets.load_from_disk wants and, last, the card."""
    records = writer.all_records()
    figures = total(map(figures_of, records))
    show(figures, "tokenize")
    if figures.samples == 0:
        dropped = count_reasons(drop for record in records for drop in record.dropped)
        raise InputError(f"no row of {settings.input} gives a sample ({told_reasons(dropped)})")
    judge(figures, settings, "the set")
    beside = {**datasets_files(records, writer.plan.hash), PICTURE_FILE: picture(figures, f"tokenize {settings.input}")}
    for name, data in beside.items():
        writer.publish_file(name, data)
    content = {**as_content(figures), **blueprint.origin}
    made_by = {**provenance(watch), "workers": settings.workers}
    return writer.finish(make_card("tokenize", writer.plan, records, content, made_by))
