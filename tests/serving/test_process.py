"""Engine processes end with the block that started them, and a dead one is named with its last words."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from draftmill.contracts.errors import ServingError
from draftmill.serving.client import CompletionClient
from draftmill.serving.process import running
from draftmill.serving.protocol import GREEDY
from serving.fake_engine import STOP_ID, letter

FAKE = [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_engines_answer_and_end_with_the_block() -> None:
    async def story() -> list[int]:
        async with running([FAKE, FAKE]) as pair, aiohttp.ClientSession() as session:
            assert [engine.name for engine in pair] == ["engine 1 of 2", "engine 2 of 2"]
            for engine in pair:
                (answer,) = await CompletionClient(session, engine.url, "", 20.0).complete([[8]], GREEDY, 2)
                assert answer.token_ids == [letter([8]), STOP_ID]
                assert engine.obituary() is None
            return [engine.process.pid for engine in pair]

    assert not any(is_running(pid) for pid in asyncio.run(story()))


def test_engines_end_when_the_block_is_left_by_an_error() -> None:
    pids = []

    async def story() -> None:
        async with running([FAKE]) as (engine,):
            pids.append(engine.process.pid)
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        asyncio.run(story())
    assert not is_running(pids[0])


def test_an_engine_that_does_not_become_ready_is_shown_with_its_last_words() -> None:
    async def story() -> None:
        async with running([FAKE, [*FAKE, "--fail"]]):
            raise AssertionError("never ready")

    with pytest.raises(ServingError, match=r"engine 2 of 2 ended with exit code 7 before .*\n.*no such target"):
        asyncio.run(story())


def test_a_killed_engine_is_named() -> None:
    async def story() -> str | None:
        async with running([FAKE]) as (engine,):
            os.kill(engine.process.pid, signal.SIGKILL)
            return await engine.wait_for_end(10.0)

    assert asyncio.run(story()) == "engine 1 of 1 was ended by SIGKILL"


def test_an_engine_ends_when_its_stdin_does() -> None:
    async def story() -> str | None:
        async with running([FAKE]) as (engine,):
            assert engine.process.stdin is not None
            engine.process.stdin.close()
            return await engine.wait_for_end(10.0)

    assert asyncio.run(story()) == "engine 1 of 1 ended with exit code 0"
