"""Sets up what parts pass through (`flow.py`) for one run, and takes it down again."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from draftmill.contracts.cards import PartRecord
from draftmill.progress import Progress
from draftmill.settings.tokenize import TokenizeSettings
from draftmill.settings.workers import usable_memory_bytes
from draftmill.storage.cache import spool_folder
from draftmill.storage.patience import Patience
from draftmill.storage.sets import SetWriter
from draftmill.storage.transfer import Transfers
from draftmill.tokenize.budget import Budget
from draftmill.tokenize.figures import figures_of
from draftmill.tokenize.flow import MAX_UPLOADS, Flow, Stages
from draftmill.tokenize.gate import judge
from draftmill.tokenize.inputs import Inputs
from draftmill.tokenize.plan import Blueprint
from draftmill.tokenize.pool import open_pool

_MEGABYTE = 1_000_000
# Beside the tokenizer that workers share: 140 MB were measured with Qwen3.6's, a chunk of lines and what it becomes.
WORKER_BYTES = 200 * _MEGABYTE

logger = logging.getLogger(__name__)


async def make_missing(writer: SetWriter, blueprint: Blueprint) -> None:
    """Makes, judges and publishes every part that some output lacks and that is this run's."""
    settings = blueprint.settings
    workers, growth_bytes = fitting(settings, len(blueprint.parts), usable_memory_bytes())
    transfers = Transfers(Patience(settings.store_patience_s))
    with spool_folder(writer.plan.hash) as spool:
        shards = _emptied(spool / "shards")
        inputs = Inputs(blueprint.source, spool / "inputs", transfers)
        async with open_pool(blueprint.rows, workers, growth_bytes) as pool:
            counter = _Counter()
            # Each part in hand takes its inputs and its shard: twice its size, and some are fetched or published.
            budget = Budget(2 * settings.part_bytes * (2 * workers + MAX_UPLOADS))
            stages = Stages(inputs, pool, transfers, shards, budget, counter)
            ours = {part.name for i, part in enumerate(blueprint.parts) if settings.makes(i)}
            flow = Flow(writer, stages, lambda part: part.name in ours, _judging(settings))
            counter.expect(sum(part.input_bytes for part in blueprint.parts if flow.is_to_be_made(part)))
            await flow.run(blueprint.parts)
            if settings.shard:
                await _close_if_whole(Flow(writer, stages, lambda part: True, _judging(settings)), blueprint)


async def _close_if_whole(flow: Flow, blueprint: Blueprint) -> None:
    """Closes the parts of other shards too, where all of them are made."""
    if not any(map(flow.is_to_be_made, blueprint.parts)):
        await flow.run(blueprint.parts)


def fitting(settings: TokenizeSettings, num_parts: int, free_bytes: int) -> tuple[int, int]:
    """How many workers fit into memory and have something to do, and by how many bytes each may grow."""
    fitting = max(1, free_bytes // WORKER_BYTES)
    workers = min(settings.workers, num_parts, fitting)
    if fitting < min(settings.workers, num_parts):
        free, each = free_bytes // _MEGABYTE, WORKER_BYTES // _MEGABYTE
        logger.warning("%d workers alone: %d MB of memory are free, and each takes about %d", workers, free, each)
    return workers, min(settings.worker_growth_bytes, max(WORKER_BYTES, free_bytes // (2 * workers)))


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _judging(settings: TokenizeSettings) -> Callable[[PartRecord], None]:
    return lambda record: judge(figures_of(record), settings, record.name, record.dropped)


class _Counter:
    """Shows how far the run is: megabytes of input, with the rows in them."""

    def __init__(self) -> None:
        self._rows = 0
        self._progress = Progress("tokenize", total=0, unit="MB")

    def expect(self, input_bytes: int) -> None:
        """So many bytes are going to be read."""
        self._progress = Progress("tokenize", total=input_bytes / _MEGABYTE, unit="MB")

    def __call__(self, read: int, rows: int) -> None:
        self._rows += rows
        self._progress.advance(read / _MEGABYTE, f"{self._rows:,} rows")
