"""The end of a run: the card of a set that is whole, or what is still other runs' work."""

import sys
from typing import Any

from draftmill.contracts.cards import Card, Plan, count_reasons, make_card, record_file, told_reasons
from draftmill.contracts.errors import InputError, StorageError
from draftmill.settings.tokenize import TokenizeSettings
from draftmill.storage.provenance import Stopwatch, provenance
from draftmill.storage.sets import SetWriter
from draftmill.tokenize.figures import as_content, figures_of, total
from draftmill.tokenize.gate import advise, judge
from draftmill.tokenize.histogram import show
from draftmill.tokenize.ledger import unmade
from draftmill.tokenize.picture import PICTURE_FILE, picture
from draftmill.tokenize.plan import Blueprint
from draftmill.tokenize.shards import datasets_files


def beside(plan: Plan) -> list[str]:
    """What a whole set holds for its readers beside shards and card."""
    return [*datasets_files((), ""), PICTURE_FILE, *(record_file(part.name) for part in plan.parts)]


def finish(writer: SetWriter, blueprint: Blueprint, watch: Stopwatch) -> Card:
    """Judges the whole, then publishes what datasets.load_from_disk wants, a picture and, last, the card."""
    settings = blueprint.settings
    if lost := writer.missing():
        raise StorageError(
            f"{', '.join(settings.output)}: {len(lost):,} parts ({lost[0].name} is the first) are missing after all "
            "was made: something else writes there, or removes; see to it, and run the same command again"
        )
    records = writer.all_records()
    dropped = [drop for record in records for drop in record.dropped]
    figures = total(map(figures_of, records))
    show(figures, "tokenize")
    advise(figures, settings.turns)
    if figures.samples == 0:
        reasons = told_reasons(count_reasons(dropped)) or "it holds none"
        raise InputError(f"no row of {settings.input} gives a sample: {reasons}")
    judge(figures, settings, "the set", dropped)
    drawn = picture(figures, f"tokenize {settings.input}")
    for name, data in {**datasets_files(records, writer.plan.hash), PICTURE_FILE: drawn}.items():
        writer.publish_file(name, data)
    content = {**as_content(figures), **blueprint.origin}
    made_by = {**provenance(watch), "workers": settings.workers}
    return writer.finish(make_card("tokenize", writer.plan, records, content, made_by))


def tell_whole(card: Card, settings: TokenizeSettings) -> None:
    """Says on stderr what there is where this process had nothing to make."""
    known = card.content
    sys.stderr.write(
        f"tokenize: {', '.join(settings.output)}: complete, {known['samples']:,} samples of {known['rows_in']:,} rows, "
        f"{known['tokens']:,} tokens, {known['supervised_frac']:.1%} of them supervised\n"
    )


def what_is_left(writer: SetWriter, settings: TokenizeSettings) -> dict[str, Any]:
    """What a run tells that is one of several: parts nobody has made, and made ones that wait for those before them."""
    open_parts = writer.missing()
    left = unmade(open_parts, writer.sizes())
    to_close = [part.name for part in open_parts if part.name not in left]
    sys.stderr.write(
        f"tokenize: {len(left):,} of {len(writer.plan.parts):,} parts are for other runs to make; {len(to_close):,} "
        f"are made, and closed after those before them; the last run closes the set in {', '.join(settings.output)}\n"
    )
    told = {"left": left, "to_close": to_close, "outputs": list(settings.output)}
    return {"room": "tokenize", "plan": writer.plan.hash, **told}
