"""Batches on their way through the engines: each engine takes the next one when it is free.

Which prompts share a batch is fixed before, so the answers depend neither on timing nor on the number of engines.
Parts are opened one after another as engines ask for work, and closed when their last batch comes back: few are open.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import aiohttp

from draftmill.chat.chat import Chat
from draftmill.contracts.errors import ServingError
from draftmill.generate.part import Batch, Limits, OpenPart, open_part
from draftmill.generate.prompts import PromptPart
from draftmill.serving.client import CompletionClient
from draftmill.serving.process import EngineProcess
from draftmill.serving.protocol import GREEDY, Choice

DEATH_WAIT_S = 3.0


@dataclass(frozen=True)
class Answering:
    """What it takes to answer parts; `close` is given each part that is whole, `progress` the rows of each batch."""

    chat: Chat
    limits: Limits
    close: Callable[[OpenPart], None]
    progress: Callable[[int], None]

    async def answer(self, parts: Iterable[PromptPart], engines: list[EngineProcess], timeout_s: float) -> None:
        """Has every part answered; ServingError naming the engine that failed."""
        work = self._work(parts)
        async with aiohttp.ClientSession() as session:
            try:
                async with asyncio.TaskGroup() as group:
                    for engine in engines:
                        client = CompletionClient(session, engine.url, "", timeout_s)
                        group.create_task(self._drain(work, engine, client))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None

    def _work(self, parts: Iterable[PromptPart]) -> Iterator[tuple[OpenPart, Batch]]:
        for source in parts:
            part = open_part(source, self.chat, self.limits)
            self.progress(len(part.conversations) - sum(map(len, part.batches)))  # dropped before they were asked
            if not part.batches:
                self.close(part)
            for batch in part.batches:
                yield part, batch

    async def _drain(
        self, work: Iterator[tuple[OpenPart, Batch]], engine: EngineProcess, client: CompletionClient
    ) -> None:
        for part, batch in work:
            await self._answer_batch(batch, engine, client)
            part.num_left -= 1
            self.progress(len(batch))
            if part.num_left == 0:
                self.close(part)

    async def _answer_batch(self, batch: Batch, engine: EngineProcess, client: CompletionClient) -> None:
        """Turn by turn: the rows of a batch whose conversation goes on are asked again, together."""
        while waiting := [c for c in batch if c.prompt_ids is not None]:
            prompts = [c.prompt_ids for c in waiting if c.prompt_ids is not None]
            for conversation, choice in zip(waiting, await self._ask(prompts, engine, client), strict=True):
                conversation.take(choice, keeps_cut=self.limits.keeps_cut)

    async def _ask(self, prompts: list[list[int]], engine: EngineProcess, client: CompletionClient) -> list[Choice]:
        try:
            return await client.complete(prompts, GREEDY, self.limits.max_new_tokens)
        except ServingError as error:
            # A connection breaks a moment before the process that held it is known to be dead.
            obituary = await engine.wait_for_end(DEATH_WAIT_S)
            if obituary is None:
                raise
            raise ServingError(f"{obituary}\nRun the same command again: whole parts are kept") from error
