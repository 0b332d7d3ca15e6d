"""Engines that we start: `python -m draftmill.extract.serve FOLDER`, one process each, ended with the `async with`.

An engine also ends by itself when this process does (its stdin closes), so that no kill leaves one behind. What it
writes to stderr is kept and shown when it fails.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from draftmill.contracts.errors import ServingError
from draftmill.serving.protocol import READY_PREFIX

START_TIMEOUT_S = 600.0
END_TIMEOUT_S = 5.0
_SHOWN_CHARS = 2000


@dataclass(frozen=True)
class EngineProcess:
    """One running engine."""

    name: str
    url: str
    process: asyncio.subprocess.Process
    stderr: IO[bytes]

    def obituary(self) -> str | None:
        """How the engine ended and what it said last, or None while it runs."""
        code = self.process.returncode
        if code is None:
            return None
        return f"{self.name} {_how(code)}{_last_words(self.stderr)}"

    async def wait_for_end(self, at_most_s: float) -> str | None:
        """The obituary, once the engine has ended; None where it runs on after `at_most_s` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), at_most_s)
        return self.obituary()


@asynccontextmanager
async def engines(folder: Path, count: int) -> AsyncIterator[list[EngineProcess]]:
    """`count` engines serving the target in `folder`, ready; all of them have ended when the block is left."""
    command = [sys.executable, "-m", "draftmill.extract.serve", str(folder)]
    async with running([command] * count) as ready:
        yield ready


@asynccontextmanager
async def running(commands: Sequence[Sequence[str]]) -> AsyncIterator[list[EngineProcess]]:
    """The engines that `commands` start, ready; ServingError with its last words where one does not become ready."""
    async with contextlib.AsyncExitStack() as stack:
        starting = [
            await stack.enter_async_context(_started(f"engine {n} of {len(commands)}", command))
            for n, command in enumerate(commands, start=1)
        ]
        yield [await _ready(*engine) for engine in starting]


@asynccontextmanager
async def _started(
    name: str, command: Sequence[str]
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process, IO[bytes]]]:
    with tempfile.TemporaryFile() as stderr:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            # Two spinning OpenMP threads on shared cores are many times slower than one.
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            # Ctrl-C goes to us, and we end the engines.
            start_new_session=True,
        )
        try:
            yield name, process, stderr
        finally:
            await _ended(process)


async def _ready(name: str, process: asyncio.subprocess.Process, stderr: IO[bytes]) -> EngineProcess:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while line := await process.stdout.readline():
                if line.decode(errors="replace").startswith(READY_PREFIX):
                    url = line.decode().removeprefix(READY_PREFIX).strip()
                    return EngineProcess(name, url, process, stderr)
            code = await process.wait()
    except TimeoutError as error:
        raise ServingError(f"{name} was not ready within {START_TIMEOUT_S:,.0f} s{_last_words(stderr)}") from error
    raise ServingError(f"{name} {_how(code)} before it was ready{_last_words(stderr)}")


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _last_words(stderr: IO[bytes]) -> str:
    size = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, size - _SHOWN_CHARS))
    words = stderr.read().decode(errors="replace").strip()
    return f"; it said:\n{words}" if words else ""
