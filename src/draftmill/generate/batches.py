"""The in-process flow: batches on their way through engines of our own, each takes the next one when it is free.

Which prompts share a batch is fixed by the plan, so the answers depend neither on timing nor on the number of engines.
Parts are opened one after another as engines ask for work, and closed when their last batch comes back: few are open.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from draftmill.contracts.errors import ServingError
from draftmill.generate.conversation import Conversation
from draftmill.generate.desk import Desk, Left
from draftmill.generate.intake import Intake
from draftmill.generate.manner import Manner
from draftmill.generate.meter import Meter
from draftmill.generate.part import OpenPart
from draftmill.generate.plan import num_engines
from draftmill.serving.client import CompletionClient
from draftmill.serving.process import EngineProcess, engines
from draftmill.serving.protocol import GREEDY, Choice

logger = logging.getLogger(__name__)

DEATH_WAIT_S = 3.0

Batch = list[Conversation]


@dataclass(frozen=True)
class BatchFlow:
    """What it takes to answer parts; `close` is given each part that is whole."""

    manner: Manner
    intake: Intake
    close: Callable[[OpenPart], None]

    async def answer(self, parts: Iterable[OpenPart], engines: list[EngineProcess]) -> None:
        """Has every part answered; ServingError naming the engine that failed."""
        work = self._work(parts)
        async with aiohttp.ClientSession() as session:
            try:
                async with asyncio.TaskGroup() as group:
                    for engine in engines:
                        client = CompletionClient(session, engine.url, "", self.manner.settings.request_timeout_s)
                        group.create_task(self._drain(work, engine, client))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None

    def _work(self, parts: Iterable[OpenPart]) -> Iterator[tuple[OpenPart, Batch]]:
        for part in parts:
            batches = cut_batches(part.conversations(self.intake, self.manner), self.manner.settings.batch_rows)
            if not batches:
                self.close(part)
            for batch in batches:
                yield part, batch

    async def _drain(
        self, work: Iterator[tuple[OpenPart, Batch]], engine: EngineProcess, client: CompletionClient
    ) -> None:
        for part, batch in work:
            # The answers of a batch depend on all of it: where a run broke off inside one, it is asked again whole.
            if not all(map(part.is_done, batch)):
                await self._answer_batch(batch, engine, client)
            for talk in batch:
                part.keep(talk.prompt.id, talk.end)
            if part.is_whole:
                self.close(part)

    async def _answer_batch(self, batch: Batch, engine: EngineProcess, client: CompletionClient) -> None:
        """Turn by turn: the rows of a batch whose conversation goes on are asked again, together."""
        while waiting := [talk for talk in batch if talk.asked is not None]:
            prompts = [talk.asked.prompt_ids for talk in waiting if talk.asked is not None]
            for talk, choice in zip(waiting, await self._ask(prompts, engine, client), strict=True):
                talk.take_choice(choice)

    async def _ask(self, prompts: list[list[int]], engine: EngineProcess, client: CompletionClient) -> list[Choice]:
        try:
            return await client.complete(prompts, GREEDY, self.manner.settings.max_new_tokens)
        except ServingError as error:
            # A connection breaks a moment before the process that held it is known to be dead.
            obituary = await engine.wait_for_end(DEATH_WAIT_S)
            if obituary is None:
                raise
            raise ServingError(f"{obituary}\nRun the same command again: whole parts are kept") from error


def cut_batches(talks: Iterable[Conversation], batch_rows: int) -> list[Batch]:
    """The conversations of a part in batches of like prompt lengths, so that little is padding."""
    # Stable: equal lengths keep the order of the input.
    waiting = sorted(talks, key=lambda talk: len(talk.asked.prompt_ids) if talk.asked else 0)
    return [waiting[start : start + batch_rows] for start in range(0, len(waiting), batch_rows)]


async def answer_in_process(desk: Desk, left: Sequence[Left]) -> dict[str, Any]:
    """Has what is left answered by engine processes of this host; returns what the card tells of them."""
    blueprint, num_asked = desk.blueprint, sum(part.num_asked for part in left)
    count = num_engines(blueprint, num_asked)
    logger.info("starting %d engines of %s for %d rows", count, blueprint.settings.target, num_asked)
    async with engines(blueprint.folder, count) as ready:
        meter = Meter(sum(part.num_prompts for part in left), tuple)
        flow = BatchFlow(blueprint.manner, desk.intake(), desk.close)
        await flow.answer(desk.open_parts(left, meter), ready)
    return {"engines": count}
