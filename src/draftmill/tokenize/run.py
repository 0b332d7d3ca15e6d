"""The story of `draftmill tokenize`: plan, make what is missing, judge and publish each part, close with the card."""

import asyncio
from functools import partial
from typing import Any

import msgspec

from draftmill.contracts.errors import StorageError
from draftmill.settings.tokenize import TokenizeSettings
from draftmill.storage.provenance import Stopwatch
from draftmill.storage.sets import SetWriter, open_set_writer
from draftmill.tokenize.closing import beside, finish, tell_whole, what_is_left
from draftmill.tokenize.engines import num_tasks, start
from draftmill.tokenize.jsonl import write_jsonl
from draftmill.tokenize.ledger import ROWS
from draftmill.tokenize.making import make_missing
from draftmill.tokenize.plan import Blueprint, draw_up
from draftmill.tokenize.preview import preview

# A second round makes what another run, that lost this folder to ours, overwrote before it noticed.
_ROUNDS = 2


def run(settings: TokenizeSettings) -> dict[str, Any]:
    """Tokenizes the input into every output; returns the card, what a dry run tells, or what is left to other runs."""
    watch = Stopwatch()
    blueprint = draw_up(settings)
    if settings.dry_run:
        return preview(blueprint)
    writer = open_set_writer(settings.output, blueprint.plan)
    card = writer.card(*beside(writer.plan))
    with writer.telling_refusal(settings.shard):
        if card is None:
            _make(writer, blueprint)
            if writer.missing() and (settings.shard or settings.engine == "slurm"):
                return what_is_left(writer, settings)
            card = writer.card(*beside(writer.plan))
        if card is None:
            card = finish(writer, blueprint, watch)
        else:
            tell_whole(card, settings)
    if "jsonl" in settings.also:
        for url in settings.output:
            write_jsonl(url)
    return msgspec.to_builtins(card)


def _make(writer: SetWriter, blueprint: Blueprint) -> None:
    """Has what is missing made, on this machine or by an engine."""
    writer.forget_refusal(blueprint.settings.shard)
    if writer.missing():
        writer.share(ROWS)
    if blueprint.settings.engine != "local":
        _start_engine(writer, blueprint)
        return
    for _ in range(_ROUNDS):
        if writer.missing():
            asyncio.run(make_missing(writer, blueprint))


def _start_engine(writer: SetWriter, blueprint: Blueprint) -> None:
    settings = blueprint.settings
    tasks = num_tasks(settings, len(blueprint.parts))
    logs = start(partial(shard, settings), settings, writer.plan.hash, tasks)
    if settings.engine == "ray" and (left := writer.missing()):
        raise StorageError(f"{len(left):,} of {len(writer.plan.parts):,} parts were not made: see {logs}/logs")


def shard(settings: TokenizeSettings, _data: Any, rank: int, world_size: int) -> None:
    """One task of an engine: every `world_size`-th part from number `rank` on."""
    ours = {"engine": "local", "shard": f"{rank + 1}/{world_size}", "workers": settings.task_cores}
    run(settings.model_copy(update=ours))
