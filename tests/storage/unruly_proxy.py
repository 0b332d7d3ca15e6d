"""A proxy between a client and an S3-compatible server that drops, cuts, delays and refuses, and caps the bandwidth.

It speaks just enough HTTP/1.1 to know where a request and its answer end. What it does to which request is drawn from a
seeded generator; `faults` may be changed while it runs. As a program it serves until it is killed:

    python tests/storage/unruly_proxy.py SERVER_PORT [BYTES_PER_S]      # prints its own port
"""

import asyncio
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_BLOCK_BYTES = 1 << 16
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@dataclass(frozen=True)
class Faults:
    """Shares of requests, in 0..1, that suffer each fault; the rest goes through."""

    drop: float = 0.0
    """The connection ends while the request is read: the server sees nothing."""
    lose_answer: float = 0.0
    """The server does as it is asked, and nobody is told."""
    truncate: float = 0.0
    """The answer's body ends half-way."""
    refuse: float = 0.0
    """503 SlowDown."""
    delay: float = 0.0
    """It takes up to `longest_delay_s` longer."""
    longest_delay_s: float = 0.2

    def draw(self, chance: random.Random) -> str:
        """The fate of one request."""
        number = chance.random()
        for fate in ("drop", "lose_answer", "truncate", "refuse", "delay"):
            number -= getattr(self, fate)
            if number < 0:
                return fate
        return "pass"


GONE = Faults(drop=1.0)
WELL_BEHAVED = Faults()


class _Bandwidth:
    """Bytes a second that all connections share, in each direction."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = time.monotonic()

    async def pass_on(self, num_bytes: int) -> None:
        if self._bytes_per_s is None:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
        await asyncio.sleep(self._free_at - now)


class UnrulyProxy:
    """Serves on a port of its own, in a thread, while it is entered."""

    def __init__(self, server_port: int, *, url: str = "", seed: int = 0, bytes_per_s: float | None = None):
        self.url = url
        """Where on the server its user may write."""
        self.faults = WELL_BEHAVED
        self.fates: Counter[str] = Counter()
        self.requests: Counter[tuple[str, str]] = Counter()
        """By method and path (query left out); those that were refused or dropped too."""
        self.sent_bytes = 0
        """Of answers' bodies."""
        self._server_port = server_port
        self._chance = random.Random(seed)
        self._down, self._up = _Bandwidth(bytes_per_s), _Bandwidth(bytes_per_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        serving = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    @property
    def endpoint(self) -> str:
        """Where clients find it."""
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        try:
            server, requests = await asyncio.open_connection("127.0.0.1", self._server_port)
            try:
                while await self._exchange((client, answers), (server, requests)):
                    pass
            finally:
                requests.close()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            answers.close()

    async def _exchange(self, client: "_Ends", server: "_Ends") -> bool:
        """One request and its answer; whether the connection lives on."""
        head = await client[0].readuntil(b"\r\n\r\n")
        method, target = head.split(b" ", 2)[:2]
        self.requests[method.decode(), target.decode().partition("?")[0]] += 1
        fate = self.faults.draw(self._chance)
        self.fates[fate] += 1
        size = _length(head)
        if fate == "drop":
            await client[0].readexactly(size // 2)
            return False
        if fate == "refuse":
            await client[0].readexactly(size)
            return await _say(client[1], b"503 Slow Down", _SLOW_DOWN)
        if fate == "delay":
            await asyncio.sleep(self._chance.random() * self.faults.longest_delay_s)
        server[1].write(head)
        await self._pump(client[0], server[1], size, self._up)
        return await self._answer(server[0], client[1], method, fate)

    async def _answer(
        self, server: asyncio.StreamReader, client: asyncio.StreamWriter, method: bytes, fate: str
    ) -> bool:
        head = await server.readuntil(b"\r\n\r\n")
        if fate == "lose_answer":
            return False
        client.write(head)
        if method == b"HEAD" or head.split(b" ", 2)[1] in (b"204", b"304"):
            return True
        if b"transfer-encoding: chunked" in head.lower():
            await self._pump_chunks(server, client)
            return True
        size = _length(head)
        if fate == "truncate":
            await self._pump(server, client, size // 2, self._down)
            return False
        await self._pump(server, client, size, self._down)
        return True

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, size: int, bandwidth: _Bandwidth
    ) -> None:
        while size:
            block = await source.read(min(size, _BLOCK_BYTES))
            if not block:
                raise ConnectionResetError
            await bandwidth.pass_on(len(block))
            sink.write(block)
            await sink.drain()
            size -= len(block)
            self.sent_bytes += len(block) if bandwidth is self._down else 0

    async def _pump_chunks(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while True:
            line = await source.readuntil(b"\r\n")
            sink.write(line)
            size = int(line.split(b";")[0], 16)
            await self._pump(source, sink, size + 2, self._down)
            if size == 0:
                return


_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


async def _say(client: asyncio.StreamWriter, status: bytes, body: bytes) -> bool:
    client.write(
        b"HTTP/1.1 %b\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
    )
    await client.drain()
    return True


if __name__ == "__main__":
    cap = float(sys.argv[2]) if len(sys.argv) > 2 else None
    with UnrulyProxy(int(sys.argv[1]), bytes_per_s=cap) as proxy:
        print(proxy.port, flush=True)
        threading.Event().wait()
