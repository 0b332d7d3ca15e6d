"""What a served run costs this side: client CPU per request against the openai SDK's loop, and memory by rows.

A stub engine in a process of its own answers 2,000 tokens with their ids (Qwen3.6's tokenizer) after a second; 256
requests are in flight. Same requests, same process, interleaved rounds; CPU-seconds of this process alone.
Then `draftmill generate` itself, of few rows and of many: its largest resident memory.
`python bench/generate.py [requests a round] [rounds] [rows]`
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import msgspec
import psutil
from openai import AsyncOpenAI

from draftmill.serving.failures import Backoff
from draftmill.serving.fleet import open_fleet
from draftmill.serving.limits import FleetLimits
from draftmill.serving.protocol import ChatRequest, Sampling

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from qwen_folder import write_qwen_tokenizer
from serving.stub_engine import started_stub

IN_FLIGHT = 256
ANSWER_TOKENS = 2000
LATENCY_S = 1.0
WAY_UP = 4  # rounds in which our concurrency comes from 32 to 256
SAMPLING = Sampling(
    temperature=0.6,
    top_p=0.95,
    top_k=20,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    seed=None,
)
LIMITS = FleetLimits(
    max_in_flight=IN_FLIGHT,
    max_attempts=3,
    max_timeouts=2,
    max_failures_in_row=20,
    connect_timeout_s=30.0,
    min_timeout_s=120.0,
    min_rate_tok_per_s=5.0,
    api_key=None,
    backoff=Backoff(0.5, 30.0),
)
KWARGS = {"enable_thinking": False}

Ask = Callable[[str], Awaitable[int]]
"""Asks one prompt; returns how many token ids came back."""


async def drive(ask: Ask, prompts: Iterable[str]) -> float:
    """CPU-seconds of asking all prompts, so many in flight."""
    left = iter(prompts)

    async def work() -> None:
        for prompt in left:
            assert await ask(prompt) > ANSWER_TOKENS // 2

    began_s = time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(work())
    return time.process_time() - began_s


def openai_loop(client: AsyncOpenAI) -> Ask:
    """As scripts do it: the SDK's own types, vendor keys in extra_body."""
    sampling = msgspec.to_builtins(SAMPLING)
    vendor = {key: sampling.pop(key) for key in ("top_k", "min_p", "repetition_penalty")}

    async def ask(prompt: str) -> int:
        answer = await client.chat.completions.create(
            model="stub",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=2 * ANSWER_TOKENS,
            extra_body={**vendor, "chat_template_kwargs": KWARGS, "return_token_ids": True},
            **sampling,
        )
        assert answer.choices[0].message.content
        return len((answer.choices[0].model_extra or {})["token_ids"])

    return ask


async def client_cpu(num_requests: int, num_rounds: int) -> dict[str, Any]:
    """CPU-milliseconds per request of each client, median over the rounds, and what the openai SDK's is of ours."""
    pool = httpx2.AsyncClient(limits=httpx2.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = str(write_qwen_tokenizer(Path(folder)))
        flags = ("--tokenizer", tokenizer, "--answer-tokens", str(ANSWER_TOKENS), "--latency-s", str(LATENCY_S))
        async with started_stub(*flags) as stub, open_fleet([stub.url], "stub", LIMITS) as fleet, pool:

            async def ours(prompt: str) -> int:
                messages = [{"role": "user", "content": prompt}]
                answer = await fleet.ask(
                    ChatRequest(
                        messages=messages, max_tokens=2 * ANSWER_TOKENS, sampling=SAMPLING, template_kwargs=KWARGS
                    )
                )
                return len(answer.token_ids or ())

            ways: dict[str, Ask] = {
                "ours": ours,
                "openai": openai_loop(AsyncOpenAI(base_url=stub.url, api_key="none")),
                "openai, pool of 256": openai_loop(AsyncOpenAI(base_url=stub.url, api_key="none", http_client=pool)),
            }
            for ask in ways.values():
                await drive(ask, [f"warm up {n}" for n in range(IN_FLIGHT)])
            for _ in range(WAY_UP):
                await drive(ours, [f"warm up {n}" for n in range(2 * IN_FLIGHT)])
            spent_ms: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(num_rounds):
                for name, ask in ways.items():
                    spent_s = await drive(ask, [f"What is {n} + {n}?" for n in range(num_requests)])
                    spent_ms[name].append(1000 * spent_s / num_requests)
            concurrency = fleet.figures()[0].concurrency
    middle = {name: median(spent) for name, spent in spent_ms.items()}
    best = min(middle["openai"], middle["openai, pool of 256"])
    print(f"client CPU per request: {num_requests} requests of {ANSWER_TOKENS} tokens, {IN_FLIGHT} in flight, ", end="")
    print(f"median of {num_rounds} rounds; our concurrency came to {concurrency}")
    for name, spent in middle.items():
        print(f"  {name:<22}{spent:>8.3f} ms {spent / middle['ours']:>6.2f} x ours")
    return {"cpu_ms_per_request": middle, "ours_over_openai": middle["ours"] / best, "concurrency": concurrency}


FEW_ROWS = 2000


async def client_memory(num_rows: int) -> dict[str, Any]:
    """Resident MB of `draftmill generate` over few rows and over `num_rows`, answers of 2,000 tokens each.

    At the end of the run, and the largest, which is the tokenizer's while it is read.
    """
    ends_mb: dict[int, float] = {}
    peaks_mb: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_qwen_tokenizer(Path(folder))
        flags = ("--tokenizer", str(tokenizer), "--answer-tokens", str(ANSWER_TOKENS), "--latency-s", str(LATENCY_S))
        async with started_stub(*flags) as stub:
            for count in (FEW_ROWS, num_rows):
                began_s = time.monotonic()
                run = asyncio.to_thread(_memory_mb, Path(folder) / str(count), tokenizer, stub.url, count)
                ends_mb[count], peaks_mb[count] = await run
                print(
                    f"  {count:>7,} rows: {ends_mb[count]:,.0f} MB at the end, {peaks_mb[count]:,.0f} MB at most, ",
                    end="",
                )
                print(f"{time.monotonic() - began_s:,.0f} s")
    return {"end_mb": ends_mb, "peak_mb": peaks_mb, "end_mb_more": ends_mb[num_rows] - ends_mb[FEW_ROWS]}


def _memory_mb(place: Path, tokenizer: Path, url: str, count: int) -> tuple[float, float]:
    """Runs the room over `count` prompts; its resident memory when it ended, and the largest."""
    place.mkdir()
    prompts = place / "prompts.jsonl"
    with prompts.open("w") as stream:
        stream.writelines(json.dumps({"id": f"r{n}", "prompt": f"What is {n} + {n}?"}) + "\n" for n in range(count))
    given = {
        "input": prompts,
        "output": place / "out",
        "spool": place / "spool",
        "target": "stub",
        "tokenizer": tokenizer,
    }
    flags = [str(arg) for key, value in given.items() for arg in (f"--{key}", value)]
    command = [sys.executable, "-m", "draftmill", "generate", *flags, "--endpoint", url, "--thinking", "off"]
    process = subprocess.Popen([*command, "--max-new-tokens", str(2 * ANSWER_TOKENS)], stdout=subprocess.DEVNULL)
    watched, end_mb = psutil.Process(process.pid), 0.0
    while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
        end_mb = watched.memory_info().rss / 2**20 or end_mb  # 0 once it is a zombie
        time.sleep(0.2)
    assert ended[1] == 0, "the run ends well"
    return end_mb, ended[2].ru_maxrss / 1024  # Linux counts kilobytes


def main(num_requests: int = 1000, num_rounds: int = 5, num_rows: int = 50_000) -> None:
    figures = asyncio.run(client_cpu(num_requests, num_rounds)) if num_rounds else {}
    figures |= asyncio.run(client_memory(num_rows)) if num_rows else {}
    print(json.dumps({"bench": "generate", **figures}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
