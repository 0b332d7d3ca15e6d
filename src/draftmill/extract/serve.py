"""`python -m draftmill.extract.serve FOLDER`: the in-process generation back end, an engine on loopback HTTP.

    POST /v1/completions   a batch of prompts (token ids) -> their greedy answers (serving/protocol.py)
    GET  /v1/models        the one target
    GET  /health           200 once it answers

It says its URL on a line of stdout when it is ready, and ends when its stdin does: with the process that started it,
however that ended. One request is decoded at a time, as one batch, so that an answer depends on its request alone.
"""

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from draftmill.chat.chat import Chat, open_chat
from draftmill.contracts.errors import DraftmillError
from draftmill.extract.decode import Answer, decode_greedy
from draftmill.extract.target import Target, load_target
from draftmill.serving.protocol import GREEDY, READY_PREFIX, Choice, Completion, Usage, error_body

MAX_BODY_BYTES = 1 << 28
# What this engine can do besides greedy decoding: nothing, so each of these must have this very value or be left out.
_FIXED = {**msgspec.to_builtins(GREEDY), "n": 1, "stream": False, "echo": False, "logprobs": None, "stop": None}
_FREE = ("seed",)  # greedy decoding is the same with any


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    prompt: list[list[int]]
    max_tokens: int
    model: str = ""
    return_token_ids: bool = False


class RefusedError(ValueError):
    """A request that cannot be honoured as it is."""


class Engine:
    """The target behind the protocol."""

    def __init__(self, target: Target, chat: Chat, name: str) -> None:
        self.target = target
        self.chat = chat
        self.name = name
        self._one_at_a_time = asyncio.Lock()

    def app(self) -> web.Application:
        """The HTTP application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        return app

    async def health(self, _request: web.Request) -> web.Response:
        """200: the target is loaded."""
        return web.Response(text="ok")

    async def models(self, _request: web.Request) -> web.Response:
        """The one model there is."""
        return web.json_response({"object": "list", "data": [{"id": self.name, "object": "model"}]})

    async def completions(self, request: web.Request) -> web.Response:
        """Decodes the request's prompts as one batch; 400 with the reason where it asks for what there is not."""
        try:
            asked = self._checked(await request.read())
        except (RefusedError, msgspec.DecodeError) as error:
            return web.Response(status=400, body=error_body(str(error), 400), content_type="application/json")
        async with self._one_at_a_time:
            answers = await asyncio.to_thread(
                decode_greedy, self.target, asked.prompt, self.chat.stop_ids, asked.max_tokens
            )
        body = msgspec.to_builtins(self._completion(asked, answers))
        if not asked.return_token_ids:
            for choice in body["choices"]:
                del choice["token_ids"]
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    def _checked(self, body: bytes) -> _Request:
        raw: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
        _refuse_sampling(raw)
        asked = msgspec.convert(raw, _Request)
        if asked.max_tokens < 1 or not asked.prompt or not all(asked.prompt):
            raise RefusedError("max_tokens must be at least 1, and there must be at least one prompt, none empty")
        longest = max(len(prompt) for prompt in asked.prompt)
        if longest + asked.max_tokens > self.target.max_positions:
            raise RefusedError(
                f"a prompt of {longest} tokens and max_tokens {asked.max_tokens} exceed the target's window of "
                f"{self.target.max_positions} tokens"
            )
        if not all(0 <= token_id < self.target.vocab_size for prompt in asked.prompt for token_id in prompt):
            raise RefusedError(f"a prompt holds ids outside [0, {self.target.vocab_size})")
        return asked

    def _completion(self, asked: _Request, answers: list[Answer]) -> Completion:
        num_read = sum(len(prompt) for prompt in asked.prompt)
        num_written = sum(len(answer.token_ids) for answer in answers)
        choices = [
            Choice(
                index=index,
                text=self.chat.decode_plain(answer.token_ids),
                finish_reason="stop" if answer.has_stopped else "length",
                token_ids=answer.token_ids,
            )
            for index, answer in enumerate(answers)
        ]
        usage = Usage(prompt_tokens=num_read, completion_tokens=num_written, total_tokens=num_read + num_written)
        return Completion(choices=choices, usage=usage, model=self.name)


def _refuse_sampling(raw: dict[str, Any]) -> None:
    """RefusedError for a parameter that greedy decoding does not honour; one left out means OpenAI's default."""
    if "temperature" not in raw:
        raise RefusedError("temperature is left out, which means 1; this engine decodes greedily: send 0")
    known = {*_FIXED, *_Request.__struct_fields__}
    if unknown := sorted(raw.keys() - known):
        raise RefusedError(f"unknown parameters {unknown}; this engine knows {sorted(known)}")
    for name, only in _FIXED.items():
        if name not in _FREE and name in raw and raw[name] != only:
            raise RefusedError(f"{name} = {raw[name]!r} cannot be honoured: this engine decodes greedily ({only!r})")


def _end_with_parent() -> None:
    """Ends this process when its stdin ends, at once: there may be a batch that nobody waits for."""
    # Not sys.stdin: its lock, held by this thread, would abort an orderly exit.
    while os.read(0, 1 << 16):
        pass
    os._exit(0)


async def _serve(folder: Path) -> None:
    engine = Engine(load_target(folder), open_chat(folder), folder.name)
    runner = web.AppRunner(engine.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    print(f"{READY_PREFIX}http://{host}:{port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        asyncio.run(_serve(Path(sys.argv[1])))
    except DraftmillError as error:
        sys.exit(str(error))
