"""A hand-made engine over real HTTP: answers as the test says, and keeps what it was asked. No torch.

Run as a program it is an engine process: it says it is ready, and answers every prompt with a letter, then 258.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

STOP_ID = 258

Reply = Callable[[dict[str, Any]], web.StreamResponse]


def letter(prompt: list[int]) -> int:
    """The byte of a small letter."""
    return ord("a") + sum(prompt) % 26


def echo(asked: dict[str, Any]) -> web.StreamResponse:
    """Answers each prompt with one letter that depends on it, and the stop token."""
    choices = [
        {"index": i, "text": "x", "finish_reason": "stop", "token_ids": [letter(prompt), STOP_ID]}
        for i, prompt in enumerate(asked["prompt"])
    ]
    return web.json_response(
        {"choices": choices, "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}
    )


@dataclass
class FakeEngine:
    """`reply` makes the response, or raises to cut the connection; `asked` holds the bodies received."""

    reply: Reply = echo
    delay_s: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        await asyncio.sleep(self.delay_s)
        try:
            return self.reply(body)
        except ConnectionAbortedError:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """The URL under which the engine answers while the block lasts."""
        app = web.Application()
        app.router.add_post("/v1/completions", self.completions)
        runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield "http://{}:{}".format(*runner.addresses[0][:2])
        finally:
            await runner.cleanup()


async def _main() -> None:
    async with FakeEngine().serving() as url:
        print(f"draftmill engine at {url}", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)


if __name__ == "__main__":
    if sys.argv[1:] == ["--fail"]:
        print(json.dumps("there is no such target"), file=sys.stderr)
        sys.exit(7)
    asyncio.run(_main())
