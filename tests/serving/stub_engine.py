"""A hand-made engine that answers chat turns over real HTTP, the same for the same prompt, and misbehaves on command.

In a test, in its process:

    stub = StubEngine(tokenizer=folder, dialect="sglang")
    async with stub.serving() as url:        # http://127.0.0.1:PORT/v1
        ...
    stub.asked, stub.hits                    # bodies as received; requests by the text of the last user message

As a process of its own (`python tests/serving/stub_engine.py --help`): it prints `stub engine at URL` once it answers,
and ends when its stdin does. `started_stub(...)` starts one. An answer of 2,000 tokens costs it 0.5 ms of CPU, with a
small tokenizer 0.8, with Qwen's tokenizer and template 1.5.

Answers: "Answer 1a2b3c4d." (a digest of the prompt) and a text, about `answer_tokens` tokens in all; where the prompt
ends in `<think>`, reasoning comes first. With a tokenizer folder, prompts are rendered by its template and all ids are
real; without, an id is a byte, and 258 ends a turn. `max_tokens` cuts, as an engine does.

Dialects: "vllm" says `reasoning` and gives the prompt's ids beside the choices, "sglang" says `reasoning_content` and
gives them inside the choice.

Commands stand in the last user message, several in the order in which they act: `[[503]]` at each request, `[[503 x2]]`
at the first two of this prompt, then the next command or a good answer. `storm` (POST /stub/storm
{"fault": "503", "for_s": 2}) does the same to every chat request for a while.

    503, 429, 400 ...   that status; with `after=1` a Retry-After of 1 s, with `date=1` as an HTTP date
    reset               half of the body, then a reset        close     the connection closed without a byte
    stall=2             the answer 2 s later                  silent    never an answer
    garbage             200 with HTML                         half      200 with half of the JSON
    null                content null, all in reasoning        empty     content "" and only the end-of-turn token
    surrogate           a lone surrogate in the content       cut       half of the answer, finish_reason "length"
    loop                a short cycle to the end              tags      a stray </think> in the content
    wrong-mode          thinking where none is wanted, none where it is
    abort               finish_reason "abort"                 die       the process ends (a process of its own only)
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from pathlib import Path
from typing import Any, Literal

import msgspec
from aiohttp import web

from draftmill.chat.chat import Chat, open_chat
from draftmill.contracts.rows import RowError

BYTE_STOP_ID = 258
NUM_TEXTS = 16
_COMMAND = re.compile(r"\[\[([a-z0-9-]+)(?:=([\d.]+))?(?: (after|date)=([\d.]+))?(?: x(\d+))?\]\]")
_WORDS = (
    *("apple", "green", "one", "red", "count", "list", "colours", "ten", "word", "three", "blue", "yellow"),
    *("two", "time", "system", "helpful", "all", "repeat"),
)


@dataclass(frozen=True)
class Fault:
    """One command. `seconds` is the stall or the Retry-After, `times` how often it acts (None: always)."""

    name: str
    seconds: float = 0.0
    form: str | None = None
    times: int | None = None


def read_faults(text: str) -> list[Fault]:
    """The commands in a text, in order."""
    return [
        Fault(name, float(stall or wait or 0), form or None, int(times) if times else None)
        for name, stall, form, wait, times in _COMMAND.findall(text)
    ]


@dataclass(frozen=True)
class Answer:
    """What the model emitted, and what the engine makes of it."""

    ids: list[int]
    reasoning: str | None
    content: str | None
    finish_reason: str = "stop"


class Speaker:
    """Texts and their ids, with a real tokenizer or byte by byte."""

    def __init__(self, tokenizer: Path | None, answer_tokens: int) -> None:
        self.chat: Chat | None = open_chat(tokenizer) if tokenizer else None
        self.stop_id = min(self.chat.stop_ids) if self.chat else BYTE_STOP_ID
        self.answer_tokens = answer_tokens
        self._texts = [self._text(random.Random(number)) for number in range(NUM_TEXTS)]

    def encode(self, text: str) -> list[int]:
        return self.chat.encode(text) if self.chat else list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return self.chat.decode(ids) if self.chat else bytes(ids).decode(errors="replace")

    def _text(self, rng: random.Random) -> tuple[str, list[int]]:
        """About `answer_tokens` tokens of whole words; it begins with a letter, so that it may follow a line end."""
        sizes = {word: len(self.encode(f" {word}")) for word in _WORDS}
        words, size = [rng.choice(_WORDS)], 16  # what stands before and after
        while size < self.answer_tokens:
            words.append(rng.choice(_WORDS))
            size += sizes[words[-1]]
        text = " ".join(words)
        return text, self.encode(text)

    def prompt(self, body: dict[str, Any], messages: list[dict[str, Any]], *, thinks: bool) -> str:
        switches = body.get("chat_template_kwargs", {})
        if self.chat:
            return self.chat.render(messages, add_generation_prompt=True, tools=body.get("tools"), **switches)
        opener = "<think>\n" if switches.get("enable_thinking", thinks) else ""
        return "".join(f"{m['role']}: {m.get('reasoning_content', '')}{m['content']}\n" for m in messages) + opener

    def say(self, digest: str, *, thinks: bool) -> tuple[str, list[int]]:
        """The raw output of a prompt, without its end."""
        text, ids = self._texts[int(digest, 16) % NUM_TEXTS]
        head = f"Why {digest}.\n</think>\n\nAnswer {digest}.\n" if thinks else f"Answer {digest}.\n"
        return head + text, self.encode(head) + ids


@dataclass
class StubEngine:
    """One engine; its fields are its settings, and what it was asked."""

    tokenizer: Path | None = None
    model: str = "stub"
    dialect: Literal["vllm", "sglang"] = "vllm"
    answer_tokens: int = 40
    window: int = 1 << 20
    thinks: bool = False
    """Whether it thinks by default, without a tokenizer; with one, its template says so."""
    has_parser: bool = True
    """Whether reasoning is taken out of the content."""
    gives_token_ids: bool = True
    is_strict: bool = False
    """Refuses keys of vLLM's and SGLang's own with 400, as a strict server does."""
    history_key: str = "both"
    """Which spelling of reasoning it reads in the history: reasoning, reasoning_content, both or none."""
    latency_s: float = 0.0
    token_s: float = 0.0
    """Seconds an output token takes."""
    slots: int | None = None
    """Requests it decodes together; others wait, as in an engine's queue. None: all."""
    most: int | None = None
    """Refuses with 429 above so many at once."""
    die_after: int | None = None
    """Ends its process at this request."""
    keeps_bodies: bool = True
    asked: list[dict[str, Any]] = field(default_factory=list)
    hits: Counter[str] = field(default_factory=Counter)
    keys: set[str | None] = field(default_factory=set)
    requests: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    storm: Fault | None = None
    storm_end_s: float = 0.0

    def __post_init__(self) -> None:
        self.speaker = Speaker(self.tokenizer, self.answer_tokens)
        self._decoding = asyncio.Semaphore(self.slots or 1 << 30)

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """The URL under which it answers while the block lasts."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self.chat_completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/stub/storm", self.begin_storm)
        app.router.add_get("/stub/figures", self.figures)
        app.router.add_get("/stub/asked", self.bodies)
        runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096, reuse_address=True).start()
        try:
            yield "http://{}:{}/v1".format(*runner.addresses[0][:2])
        finally:
            await runner.cleanup()

    async def models(self, _request: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "owned_by": self.dialect, "max_model_len": self.window}
        return web.json_response({"object": "list", "data": [card]})

    async def begin_storm(self, request: web.Request) -> web.Response:
        wanted = await request.json()
        (self.storm,) = read_faults(f"[[{wanted['fault']}]]")
        self.storm_end_s = time.monotonic() + wanted["for_s"]
        return web.json_response({})

    async def figures(self, _request: web.Request) -> web.Response:
        names = ("requests", "in_flight", "most_in_flight", "hits")
        return web.json_response({name: vars(self)[name] for name in names})

    async def bodies(self, _request: web.Request) -> web.Response:
        return web.json_response(self.asked)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        self.keys.add(request.headers.get("Authorization"))
        data = await request.read()
        body = msgspec.json.decode(data, type=dict[str, Any])
        if self.keeps_bodies:
            self.asked.append(body)
        self.requests += 1
        if self.requests == self.die_after:
            os._exit(1)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.most is not None and self.in_flight > self.most:
                return _refusal(429, "too many requests at once")
            return await self._answered(request, body, self._fault(body))
        finally:
            self.in_flight -= 1

    def _fault(self, body: dict[str, Any]) -> Fault | None:
        """The command that acts on this request."""
        asked = [str(m["content"]) for m in body["messages"] if m["role"] == "user"]
        last = asked[-1] if asked else ""
        hit = self.hits[last]
        self.hits[last] += 1
        if time.monotonic() < self.storm_end_s:
            return self.storm
        for fault in read_faults(last):
            if fault.times is None or hit < fault.times:
                return fault
            hit -= fault.times
        return None

    async def _answered(self, request: web.Request, body: dict[str, Any], fault: Fault | None) -> web.StreamResponse:
        name = fault.name if fault else ""
        if fault and name.isdigit():
            return _refusal(int(name), f"commanded {name}", fault)
        if name == "die":
            os._exit(1)
        if name == "close":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if name == "silent":
            await asyncio.sleep(3600)
        if name == "garbage":
            return web.Response(text="<html>bad gateway</html>", content_type="text/html")
        if fault and name == "stall":
            await asyncio.sleep(fault.seconds)
        answer, prompt_ids, refusal = self._made(body, name)
        if refusal:
            return refusal
        async with self._decoding:
            await asyncio.sleep(self.latency_s + self.token_s * len(answer.ids))
        return await self._sent(request, self._json(body, answer, prompt_ids), name)

    def _made(self, body: dict[str, Any], fault: str) -> tuple[Answer, list[int], web.Response | None]:
        none = Answer([], None, None)
        if self.is_strict and (foreign := sorted(body.keys() & {"return_token_ids", "return_meta_info"})):
            return none, [], _refusal(400, f"Unrecognized request argument supplied: {foreign[0]}")
        if body["model"] != self.model:
            return none, [], _refusal(404, f"The model `{body['model']}` does not exist.")
        messages = [self._heard(message) for message in body["messages"]]
        try:
            prompt = self.speaker.prompt(body, messages, thinks=self.thinks)
        except RowError as error:
            return none, [], _refusal(400, str(error))
        prompt_ids = self.speaker.encode(prompt)
        if len(prompt_ids) + body["max_tokens"] > self.window:
            words = f"This model's maximum context length is {self.window} tokens: {len(prompt_ids)} in the messages."
            return none, [], _refusal(400, words)
        digest = hashlib.blake2b(prompt.encode(), digest_size=4).hexdigest()
        return self._answer(digest, body["max_tokens"], fault, prompt.rstrip().endswith("<think>")), prompt_ids, None

    def _heard(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as its template gets it."""
        kept = {k: v for k, v in message.items() if k not in ("reasoning", "reasoning_content")}
        keys = ("reasoning", "reasoning_content") if self.history_key == "both" else (self.history_key,)
        reasoning = next((message[key] for key in keys if message.get(key) is not None), None)
        if reasoning is not None:
            kept["reasoning_content"] = reasoning
        if calls := kept.get("tool_calls"):
            kept["tool_calls"] = [_with_mapping(call) for call in calls]
        return kept

    def _answer(self, digest: str, max_tokens: int, fault: str, thinks: bool) -> Answer:
        speaker = self.speaker
        if fault == "wrong-mode":
            thinks = not thinks
        text, ids = speaker.say(digest, thinks=thinks)
        if fault == "loop":
            ids += speaker.encode(" red blue" * 200)
        if fault == "tags":
            ids += speaker.encode("\n</think>\nmore")
        if fault == "empty":
            text, ids = "", []
        limit = min(max_tokens, len(ids) // 2) if fault in ("cut", "null") else max_tokens
        finish_reason = "length" if len(ids) >= limit else "stop"
        ids = ids[:limit] if finish_reason == "length" else [*ids, speaker.stop_id]
        if finish_reason == "length" or fault in ("loop", "tags"):
            text = speaker.decode(ids if finish_reason == "length" else ids[:-1])
        if fault == "null":
            return Answer(ids, text.split("</think>")[0], None, "length")
        answer = self._parsed(text, ids, thinks=thinks, finish_reason=finish_reason)
        if fault == "surrogate":
            return replace(answer, content=f"{answer.content}\ud83d")
        return replace(answer, finish_reason="abort") if fault == "abort" else answer

    def _parsed(self, text: str, ids: list[int], *, thinks: bool, finish_reason: str) -> Answer:
        """As a reasoning parser does: up to `</think>` it is reasoning, and all of it where that never comes."""
        if not (thinks and self.has_parser):
            return Answer(ids, None, text, finish_reason)
        reasoning, tag, content = text.partition("</think>")
        return Answer(ids, reasoning, content if tag else None, finish_reason)

    def _json(self, body: dict[str, Any], answer: Answer, prompt_ids: list[int]) -> bytes:
        spelling = "reasoning" if self.dialect == "vllm" else "reasoning_content"
        message = {"role": "assistant", "content": answer.content, spelling: answer.reasoning, "tool_calls": None}
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(answer.ids)}
        whole = {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": self.model, "usage": usage}
        whole["choices"] = [choice]
        if self.gives_token_ids and body.get("return_token_ids"):
            choice["token_ids"] = answer.ids
            (whole if self.dialect == "vllm" else choice)["prompt_token_ids"] = prompt_ids
        try:
            return msgspec.json.encode(whole)
        except UnicodeEncodeError:
            return json.dumps(whole).encode()

    async def _sent(self, request: web.Request, data: bytes, fault: str) -> web.StreamResponse:
        if fault == "half":
            data = data[: len(data) // 2]
        if fault != "reset":
            return web.Response(body=data, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        assert request.transport is not None
        request.transport.abort()
        return response


def _with_mapping(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}


def _refusal(status: int, words: str, fault: Fault | None = None) -> web.Response:
    headers = {}
    if fault and fault.form:
        date = formatdate(time.time() + fault.seconds, usegmt=True)
        headers["Retry-After"] = date if fault.form == "date" else f"{fault.seconds:g}"
    return web.json_response({"error": {"message": words, "code": status}}, status=status, headers=headers)


@dataclass(frozen=True)
class StartedStub:
    """An engine process; `process.kill()` is what a crash looks like."""

    url: str
    process: asyncio.subprocess.Process


@asynccontextmanager
async def started_stub(*flags: str) -> AsyncIterator[StartedStub]:
    """A stub in a process of its own, ended with the block; `flags` as in --help."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__)), *flags, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        yield StartedStub(line.removeprefix("stub engine at ").strip(), process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--model", default="stub")
    parser.add_argument("--dialect", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--answer-tokens", type=int, default=40)
    parser.add_argument("--window", type=int, default=1 << 20)
    parser.add_argument("--thinks", action="store_true")
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--slots", type=int)
    parser.add_argument("--most", type=int)
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--keeps-bodies", action="store_true")
    return parser.parse_args()


async def _main() -> None:
    settings = vars(_flags())
    port = settings.pop("port")
    async with StubEngine(**settings).serving(port) as url:
        print(f"stub engine at {url}", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)


if __name__ == "__main__":
    asyncio.run(_main())
