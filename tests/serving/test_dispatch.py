"""Places go to the least loaded endpoint, in turn, and none is ever lost."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from draftmill.serving.dispatch import Dispatcher
from draftmill.serving.endpoint import Endpoint, connected
from draftmill.serving.failures import FleetDownError
from serving.fleets import limits


def told(num_endpoints: int, story: Callable[[Dispatcher, list[Endpoint]], Awaitable[None]], places: int = 2) -> None:
    """Tells a story with endpoints that nobody asks."""

    async def telling() -> None:
        async with AsyncExitStack() as stack:
            names = [f"http://engine-{n}/v1" for n in range(num_endpoints)]
            allowed = limits(max_in_flight=places)
            endpoints = [await stack.enter_async_context(connected(url, "stub", allowed)) for url in names]
            await asyncio.wait_for(story(Dispatcher(endpoints), endpoints), 5)

    asyncio.run(telling())


def test_the_least_loaded_endpoint_is_next() -> None:
    async def story(dispatcher: Dispatcher, endpoints: list[Endpoint]) -> None:
        for _ in range(6):
            await dispatcher.take()
        assert [endpoint.in_flight for endpoint in endpoints] == [2, 2, 2]
        dispatcher.give_back(endpoints[1])
        assert await dispatcher.take() is endpoints[1]

    told(3, story, places=8)


def test_load_is_measured_by_what_an_endpoint_can_take() -> None:
    async def story(dispatcher: Dispatcher, endpoints: list[Endpoint]) -> None:
        endpoints[0].health.concurrency.failed(1.0)
        for _ in range(9):
            await dispatcher.take()
        assert [endpoint.in_flight for endpoint in endpoints] == [3, 6]

    told(2, story, places=8)


def test_who_came_first_is_served_first() -> None:
    async def story(dispatcher: Dispatcher, endpoints: list[Endpoint]) -> None:
        served: list[int] = []
        taken = [await dispatcher.take() for _ in range(2)]

        async def wait_in_line(number: int) -> None:
            await dispatcher.take()
            served.append(number)

        line = [asyncio.create_task(wait_in_line(number)) for number in range(2)]
        await asyncio.sleep(0)
        for endpoint in taken:
            dispatcher.give_back(endpoint)
            latecomer = asyncio.create_task(dispatcher.take())
        await asyncio.gather(*line)
        assert served == [0, 1] and not latecomer.done()
        latecomer.cancel()

    told(1, story)


def test_a_place_handed_over_in_the_moment_of_a_cancellation_goes_to_the_next() -> None:
    async def story(dispatcher: Dispatcher, endpoints: list[Endpoint]) -> None:
        held = await dispatcher.take()
        doomed, next_one = (asyncio.create_task(dispatcher.take()) for _ in range(2))
        await asyncio.sleep(0)
        dispatcher.give_back(held)
        doomed.cancel()
        assert await next_one is held
        assert held.in_flight == 1

    told(1, story, places=1)


def test_those_who_wait_and_those_who_come_are_sent_away() -> None:
    async def story(dispatcher: Dispatcher, endpoints: list[Endpoint]) -> None:
        await dispatcher.take()
        waiting = asyncio.create_task(dispatcher.take())
        await asyncio.sleep(0)
        dispatcher.close(FleetDownError("all are down"))
        for one in (waiting, dispatcher.take()):
            with pytest.raises(FleetDownError):
                await one

    told(1, story, places=1)
