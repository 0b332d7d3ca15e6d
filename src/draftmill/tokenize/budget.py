"""Bytes that may be in hand at a time: what bounds a stage that runs ahead of the next one."""

import asyncio
from collections import deque


class Budget:
    """`limit` bytes, taken in the order in which they are asked for. More than the limit is granted to one alone."""

    def __init__(self, limit: int) -> None:
        self._left = self._limit = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, amount: int) -> None:
        """Waits until `amount` bytes may be taken, and takes them."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((amount, turn))
        self._grant()
        await turn

    def give_back(self, amount: int) -> None:
        """Returns bytes that were taken."""
        self._left += amount
        self._grant()

    def _grant(self) -> None:
        while self._waiting and (self._waiting[0][0] <= self._left or self._left == self._limit):
            amount, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._left -= amount
                turn.set_result(None)
