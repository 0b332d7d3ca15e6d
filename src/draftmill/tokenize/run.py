"""The story of `draftmill tokenize`: plan, make what is missing, judge and publish each part, close with the card."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from draftmill.contracts.cards import Card, PartRecord, make_card
from draftmill.contracts.errors import InputError
from draftmill.progress import Progress
from draftmill.settings.tokenize import TokenizeSettings
from draftmill.storage.cache import spool_folder
from draftmill.storage.provenance import Stopwatch, provenance
from draftmill.storage.sets import SetWriter, open_set_writer
from draftmill.tokenize.figures import as_content, figures_of, total
from draftmill.tokenize.gate import judge
from draftmill.tokenize.histogram import show
from draftmill.tokenize.part import Craft, PartJob, find_repeats
from draftmill.tokenize.plan import Blueprint, describe, draw_up
from draftmill.tokenize.pool import Pool
from draftmill.tokenize.shards import datasets_files


def run(settings: TokenizeSettings) -> dict[str, Any]:
    """Tokenizes the input into every output; returns the card, or what a dry run tells."""
    watch = Stopwatch()
    blueprint = draw_up(settings)
    if settings.dry_run:
        return describe(blueprint, settings)
    writer = open_set_writer(settings.output, blueprint.plan)
    card = writer.card()
    if card is None:
        _make_missing(writer, blueprint, settings)
        card = _finish(writer, blueprint, settings, watch)
    return msgspec.to_builtins(card)


def _make_missing(writer: SetWriter, blueprint: Blueprint, settings: TokenizeSettings) -> None:
    """Makes, judges and publishes every part that some output lacks; judged again, published parts stay."""
    missing = {part.name for part in writer.missing()}
    if not missing:
        return
    workers = min(settings.workers, len(blueprint.pieces))
    with spool_folder(writer.plan.hash) as spool, Pool(_craft(blueprint, settings, spool), workers) as pool:
        jobs, rows = find_repeats(pool.scan([PartJob(name, pieces) for name, pieces in blueprint.pieces.items()]))
        progress = Progress("tokenize", total=sum(rows[name] for name in missing), unit="rows")
        for job, record in pool.make([job for job in jobs if job.name in missing]):
            judge(figures_of(record), settings, job.name)
            writer.publish(record, spool / record.file)
            (spool / record.file).unlink()
            progress.advance(record.rows_in, note=f"{job.name}: {record.tokens:,} tokens")


def _craft(blueprint: Blueprint, settings: TokenizeSettings, spool: Path) -> Craft:
    return Craft(
        url=blueprint.source.store.url,
        tokenizer=blueprint.tokenizer,
        turns=settings.turns,
        max_tokens=settings.max_tokens,
        plan=blueprint.plan.hash,
        spool=spool,
    )


def _finish(writer: SetWriter, blueprint: Blueprint, settings: TokenizeSettings, watch: Stopwatch) -> Card:
    """Judges the whole, then publishes what datasets.load_from_disk wants and, last, the card."""
    made = writer.records()
    records = tuple(made[part.name] for part in writer.plan.parts)
    figures = total(map(figures_of, records))
    show(figures, "tokenize")
    if figures.samples == 0:
        raise InputError(f"no row of {settings.input} gives a sample: {_reasons(records)}")
    judge(figures, settings, "the set")
    for name, data in datasets_files(records, writer.plan.hash).items():
        writer.publish_file(name, data)
    content = {
        **as_content(figures),
        "tokenizer_hash": blueprint.chat.tokenizer_hash,
        "template_hash": blueprint.chat.template_hash,
        "borders": asdict(blueprint.borders),
        "input_plan": blueprint.source.card.get("plan"),
    }
    made_by = {**provenance(watch), "workers": settings.workers}
    return writer.finish(make_card("tokenize", writer.plan, records, content, made_by))


def _reasons(records: Sequence[PartRecord]) -> str:
    counts = Counter(drop.reason for record in records for drop in record.dropped)
    return "; ".join(f"{reason}: {count:,} rows" for reason, count in counts.most_common())
