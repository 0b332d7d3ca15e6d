"""Served runs as a user starts them: a stub engine over real HTTP, and `draftmill generate` asking it."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.cli import main

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
from stub_engine import StubEngine

# Failures are what these runs are about: no test waits long for one.
QUICK = {"max_attempts": 3, "max_failures_in_row": 4, "min_timeout_s": 20}


@contextmanager
def stub_at_work(
    kind: type[StubEngine] = StubEngine, port: int = 0, **settings: Any
) -> Iterator[tuple[StubEngine, str]]:
    """A stub in a thread of its own, and its URL."""
    started: list[tuple[StubEngine, str]] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        stub = kind(**settings)
        async with stub.serving(port) as url:
            started.append((stub, url))
            ready.set()
            while not done.is_set():
                await asyncio.sleep(0.005)

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield started[0]
    finally:
        done.set()
        thread.join(10)


@dataclass(frozen=True)
class Desk:
    """Where a run reads and writes; `flags` of every run in it."""

    folder: Path
    tokenizer: Path
    flags: dict[str, Any]

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def prompts(self, rows: Sequence[dict[str, Any] | str], name: str = "p.jsonl") -> Path:
        """A file of prompts; texts become rows with ids r0, r1, …"""
        made = [row if isinstance(row, dict) else {"id": f"r{n}", "prompt": row} for n, row in enumerate(rows)]
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / name
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made), encoding="utf-8")
        return file

    def command(self, *urls: str, **changes: Any) -> list[str]:
        """The arguments of `draftmill`; a value None leaves a flag out, a list gives it again and again."""
        given = {
            "input": str(self.folder / "p.jsonl"),
            "output": str(self.out),
            "target": "stub",
            "tokenizer": str(self.tokenizer),
            "spool": str(self.folder / "spool"),
            "endpoint": list(urls),
            **QUICK,
            **self.flags,
            **changes,
        }
        flags = [(key, one) for key, value in given.items() for one in (value if isinstance(value, list) else [value])]
        return ["generate", *(arg for key, one in flags if one is not None for arg in _flag(key, one))]

    def generate(self, *urls: str, **changes: Any) -> int:
        """The exit code of one run."""
        return main(self.command(*urls, **changes))

    def start(self, *urls: str, limit_bytes: int | None = None, **changes: Any) -> "subprocess.Popen[str]":
        """The same in a process of its own; `limit_bytes`: no file may grow beyond it, as on a full disk."""
        command = [sys.executable, "-m", "draftmill", *self.command(*urls, **changes)]
        if limit_bytes is not None:
            limit = (
                f"import resource, os, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes}, {limit_bytes}))"
            )
            command = [sys.executable, "-c", f"{limit}; os.execv(sys.argv[1], sys.argv[1:])", *command]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

    def spooled(self) -> list[str]:
        """Ids that the spool holds of parts that are not published yet."""
        lines: list[bytes] = []
        for file in (self.folder / "spool").glob("*/part-*.jsonl"):
            with suppress(FileNotFoundError):  # published in this moment
                lines += file.read_bytes().split(b"\n")[:-1]
        return [json.loads(line.partition(b"\t")[0])["id"] for line in lines]


def _flag(key: str, value: Any) -> list[str]:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, dict):
        return [arg for pair in value.items() for arg in (f"--{name}", *map(str, pair))]
    return [f"--{name}", str(value)]


class StubProcess:
    """A stub in a process of its own, that can be killed and started again at the same address."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self._process = self._started("--port", "0")
        self.url = self._said()

    def _started(self, *flags: str) -> "subprocess.Popen[str]":
        file = Path(__file__).parents[1] / "serving" / "stub_engine.py"
        command = [sys.executable, str(file), *self._flags, *flags]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().removeprefix("stub engine at ").strip()

    def kill(self) -> None:
        """As a crash does it."""
        self._process.kill()
        self._process.communicate()

    def start_again(self) -> None:
        """At the address it had."""
        self._process = self._started("--port", self.url.rpartition(":")[2].partition("/")[0])
        assert self._said() == self.url

    def storm(self, fault: str, for_s: float) -> None:
        """Has it answer every request with a fault for a while."""
        body = json.dumps({"fault": fault, "for_s": for_s}).encode()
        request = urllib.request.Request(self.url.removesuffix("/v1") + "/stub/storm", body, method="POST")
        urllib.request.urlopen(request, timeout=10).read()
