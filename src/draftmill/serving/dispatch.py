"""Places at the endpoints: each request gets one at the least loaded endpoint with room, first come first served."""

import asyncio
from collections import deque
from collections.abc import Sequence

from draftmill.serving.endpoint import Endpoint


class Dispatcher:
    """Hands places out, and never loses one: not to a request that was cancelled while it waited, either."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = endpoints
        self._waiting: deque[asyncio.Future[Endpoint]] = deque()
        self._closed_by: BaseException | None = None

    async def take(self) -> Endpoint:
        """An endpoint with a place for one request, as soon as there is one; raises what `close` was given."""
        if self._closed_by:
            raise self._closed_by
        if not self._waiting and (endpoint := self._least_loaded()):
            endpoint.in_flight += 1
            return endpoint
        future: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                self.give_back(future.result())  # it was handed over in the same moment
            raise

    def give_back(self, endpoint: Endpoint) -> None:
        """Frees the place for the next in line."""
        endpoint.in_flight -= 1
        self.hand_out()

    def hand_out(self) -> None:
        """Gives the room there is to those who wait."""
        while self._waiting and (endpoint := self._least_loaded()):
            future = self._waiting.popleft()
            if not future.done():
                endpoint.in_flight += 1
                future.set_result(endpoint)

    def close(self, error: BaseException) -> None:
        """Sends everybody away who waits or comes."""
        self._closed_by = error
        for future in self._waiting:
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()

    def _least_loaded(self) -> Endpoint | None:
        return min((e for e in self._endpoints if e.has_room), key=lambda e: e.load, default=None)
