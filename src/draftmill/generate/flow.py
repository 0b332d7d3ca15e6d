"""The served flow: prompts from an iterator, a bounded number of conversations at once, each saved when it ends.

As many workers as the fleet may have requests take the next prompt when their last one is done. So nothing is made for
a prompt before its turn (NVIDIA-NeMo/Skills#344), nothing waits for the prompt before it (deepseek-ai/DeepSpec#35), and
a prompt that is stuck holds up its own part alone.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draftmill.generate.conversation import Asked, Conversation
from draftmill.generate.desk import Desk, Left
from draftmill.generate.intake import Intake
from draftmill.generate.manner import Manner
from draftmill.generate.meter import Meter
from draftmill.generate.part import OpenPart
from draftmill.generate.ready import agreed, endpoint_on_card, limits_of
from draftmill.progress import PLAIN_EVERY_S
from draftmill.serving.failures import AttemptsExhaustedError, RequestRefusedError
from draftmill.serving.fleet import Fleet, open_fleet
from draftmill.serving.protocol import ChatRequest

GIVEN_UP = "given up after repeated failures"


@dataclass(frozen=True)
class ServedFlow:
    """What it takes to answer parts; `close` is given each part that is whole, in a thread of its own."""

    manner: Manner
    intake: Intake
    meter: Meter
    close: Callable[[OpenPart], None]

    async def answer(self, parts: Iterable[OpenPart], fleet: Fleet, num_prompts: int) -> None:
        """Has every part answered; raises the first failure that concerns more than one row."""
        work = self._work(parts)
        ticker = asyncio.create_task(self._tick())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(max(1, min(fleet.max_in_flight, num_prompts))):
                    group.create_task(self._drain(work, fleet))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            ticker.cancel()

    def _work(self, parts: Iterable[OpenPart]) -> Iterator[tuple[OpenPart, Conversation | None]]:
        """Conversations with their parts; none where a part was read to its end, which may make it whole."""
        for part in parts:
            for talk in part.conversations(self.intake, self.manner):
                if part.is_done(talk):
                    part.keep(talk.prompt.id, None)
                else:
                    yield part, talk
            yield part, None

    async def _drain(self, work: Iterator[tuple[OpenPart, Conversation | None]], fleet: Fleet) -> None:
        for part, talk in work:
            if talk is not None:
                await self._converse(part, talk, fleet)
            if part.is_whole and not part.is_closing:
                part.is_closing = True
                # Packing and sending a part takes seconds, which the conversations need not wait.
                await asyncio.to_thread(self.close, part)

    async def _converse(self, part: OpenPart, talk: Conversation, fleet: Fleet) -> None:
        while talk.asked is not None:
            try:
                talk.take_chat(await fleet.ask(self._request(talk, talk.asked)))
            except RequestRefusedError as error:
                part.fail(talk, f"refused with HTTP {error.status}" if error.status else "refused", str(error))
                return
            except AttemptsExhaustedError as error:
                part.fail(talk, GIVEN_UP, str(error))
                return
        part.keep(talk.prompt.id, talk.end)

    def _request(self, talk: Conversation, asked: Asked) -> ChatRequest:
        return ChatRequest(
            messages=asked.messages,
            max_tokens=asked.max_tokens,
            sampling=asked.sampling,
            tools=talk.prompt.row.tools,
            template_kwargs=dict(self.manner.settings.switches),
        )

    async def _tick(self) -> None:
        """Tells that the run lives while long answers are being written."""
        while True:
            await asyncio.sleep(PLAIN_EVERY_S)
            self.meter.tick()


async def answer_served(desk: Desk, left: Sequence[Left]) -> dict[str, Any]:
    """Has what is left answered by the endpoints; returns what the card tells of them."""
    manner, settings = desk.blueprint.manner, desk.blueprint.settings
    name = settings.served_name or settings.target
    async with open_fleet(settings.endpoint, name, limits_of(settings)) as fleet:
        manner = await agreed(fleet, manner)
        meter = Meter(sum(part.num_prompts for part in left), fleet.figures)
        flow = ServedFlow(manner, desk.intake(), meter, desk.close)
        await flow.answer(desk.open_parts(left, meter), fleet, sum(part.num_asked for part in left))
        return {"endpoints": [endpoint_on_card(figures) for figures in fleet.figures()]}
