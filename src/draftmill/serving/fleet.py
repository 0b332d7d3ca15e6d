"""All engines of a run as one: each request goes to the least loaded, and again elsewhere when that fails.

in    chat requests, as many at once as `max_in_flight`
out   answers; RequestRefusedError or AttemptsExhaustedError where a row failed, FleetDownError where the run must stop
"""

import asyncio
import resource
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from draftmill.contracts.errors import RecipeError
from draftmill.serving import failures
from draftmill.serving.dispatch import Dispatcher
from draftmill.serving.endpoint import Endpoint, EndpointFigures, connected
from draftmill.serving.failures import AttemptsExhaustedError, FleetDownError, Setback
from draftmill.serving.limits import FleetLimits
from draftmill.serving.probe import ProbeResult, ProbeWish, probe_all
from draftmill.serving.protocol import ChatAnswer, ChatRequest

_OTHER_FILES = 512  # parts, spools, libraries


class Fleet:
    """Engines that serve one model."""

    def __init__(self, endpoints: Sequence[Endpoint], limits: FleetLimits) -> None:
        self._endpoints = endpoints
        self._limits = limits
        self._dispatcher = Dispatcher(endpoints)

    @property
    def max_in_flight(self) -> int:
        """Most requests that can be in flight: more of them at once would only wait here."""
        return len(self._endpoints) * self._limits.max_in_flight

    def figures(self) -> tuple[EndpointFigures, ...]:
        """What each endpoint has done so far, and how it is."""
        return tuple(endpoint.figures() for endpoint in self._endpoints)

    async def probe(self, wish: ProbeWish) -> list[ProbeResult]:
        """Asks every endpoint once; ServingError naming each that does not do what the run needs."""
        return await probe_all(self._endpoints, wish)

    async def ask(self, request: ChatRequest) -> ChatAnswer:
        """The answer to one request. Safe to cancel: its place goes to the next, its connection is closed."""
        reasons: Counter[str] = Counter()
        while True:
            endpoint = await self._dispatcher.take()
            try:
                return await endpoint.ask(request, reasons[failures.TIMEOUT])
            except Setback as setback:
                failure = setback
            finally:
                self._stop_if_down()
                self._dispatcher.give_back(endpoint)
            reasons[failure.kind] += 1
            self._give_up_if_spent(reasons, f"{endpoint.url}: {failure}")
            if endpoint.health.is_up:  # else the wait is the endpoint's, and others may be free at once
                await asyncio.sleep(self._limits.backoff.delay_s(reasons.total()))

    def _give_up_if_spent(self, reasons: Counter[str], last: str) -> None:
        is_spent = reasons.total() >= self._limits.max_attempts
        if is_spent or reasons[failures.TIMEOUT] >= self._limits.max_timeouts:
            raise AttemptsExhaustedError(+reasons, last)

    def _stop_if_down(self) -> None:
        """Sends everybody away once no endpoint is worth another try."""
        if all(e.health.failures_in_row >= self._limits.max_failures_in_row for e in self._endpoints):
            self._dispatcher.close(FleetDownError(self._obituary()))

    def _obituary(self) -> str:
        told = "\n".join(
            f"  {e.url}: {e.health.failures_in_row} failures in a row, the last: {e.health.last_failure}"
            for e in self._endpoints
        )
        return (
            f"no engine answers any more:\n{told}\nWhat is done is saved: see to the engines, then run the same "
            "command again, and it goes on where it stopped"
        )

    async def keep(self, endpoint: Endpoint) -> None:
        """Watches over one endpoint, until cancelled: tries it again whenever it has been set aside."""
        while True:
            await endpoint.health.has_fallen.wait()
            await endpoint.try_again()
            self._stop_if_down()
            self._dispatcher.hand_out()

    def keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        """Hands a fault in the keeping to those who would wait for ever."""
        if not keeper.cancelled() and (fault := keeper.exception()):
            self._dispatcher.close(fault)


@asynccontextmanager
async def open_fleet(urls: Sequence[str], model: str, limits: FleetLimits) -> AsyncIterator[Fleet]:
    """The engines at `urls` (http://host:port/v1), which serve `model`; RecipeError where one is no URL."""
    addresses = list(dict.fromkeys(map(_checked, urls)))
    _make_room_for_connections(len(addresses) * limits.max_in_flight)
    async with AsyncExitStack() as stack:
        endpoints = [await stack.enter_async_context(connected(url, model, limits)) for url in addresses]
        fleet = Fleet(endpoints, limits)
        keepers = [asyncio.create_task(fleet.keep(endpoint)) for endpoint in endpoints]
        for keeper in keepers:
            keeper.add_done_callback(fleet.keeper_ended)
        try:
            yield fleet
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise RecipeError(f"--endpoint {url} is no URL; give one like http://host:8000/v1")
    return url.rstrip("/")


def _make_room_for_connections(count: int) -> None:
    """Raises this process's limit of open files, often 1,024, as far as it may: a connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
