"""The in-process engine answers as a batch decoded alone would, refuses what it cannot do, and dies with its parent."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from draftmill.chat.chat import open_chat
from draftmill.extract.decode import decode_greedy
from draftmill.extract.serve import Engine
from draftmill.extract.target import load_target
from draftmill.serving.protocol import GREEDY, READY_PREFIX, request_body
from tiny import IM_END_ID, VOCAB_SIZE, write_tiny_target

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), num_layers=2)


def post(folder: Path, *bodies: bytes) -> list[tuple[int, dict[str, Any]]]:
    """Status and JSON of each request, sent at the same time to one engine."""

    async def posting() -> list[tuple[int, dict[str, Any]]]:
        engine = Engine(load_target(folder), open_chat(folder), "tiny")
        async with TestClient(TestServer(engine.app())) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", data=body) for body in bodies))
            return [(answer.status, await answer.json()) for answer in answers]

    return asyncio.run(posting())


def body(**changed: Any) -> bytes:
    return json.dumps({"prompt": [[1, 2]], "max_tokens": 3, "temperature": 0, **changed}).encode()


def test_a_batch_is_answered_with_token_ids_and_finish_reasons(folder: Path) -> None:
    prompts = [[7], [1, 2, 3], [IM_END_ID, 10, 11, 12]]
    ((status, answer),) = post(folder, request_body("tiny", prompts, GREEDY, 40))
    assert status == 200
    expected = decode_greedy(load_target(folder), prompts, frozenset({IM_END_ID}), 40)
    assert [c["token_ids"] for c in answer["choices"]] == [a.token_ids for a in expected]
    reasons = ["stop" if a.has_stopped else "length" for a in expected]
    assert [c["finish_reason"] for c in answer["choices"]] == reasons
    assert [c["token_ids"][-1] == IM_END_ID for c in answer["choices"]] == [r == "stop" for r in reasons]
    assert all("<|im_end|>" not in c["text"] for c in answer["choices"])
    written = sum(len(a.token_ids) for a in expected)
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": written, "total_tokens": 8 + written}


def test_token_ids_are_sent_when_asked_for(folder: Path) -> None:
    ((_, answer),) = post(folder, body())
    assert "token_ids" not in answer["choices"][0]


def test_requests_at_the_same_time_are_answered_as_each_alone(folder: Path) -> None:
    bodies = [request_body("tiny", [[n, n + 1], [n]], GREEDY, 6) for n in range(4)]
    together = post(folder, *bodies)
    assert together == [post(folder, one)[0] for one in bodies]


@pytest.mark.parametrize(
    ("request_body", "words"),
    [
        (body(temperature=0.7), "temperature = 0.7 cannot be honoured"),
        (b'{"prompt": [[1]], "max_tokens": 3}', "temperature is left out"),
        (body(n=2), "n = 2 cannot be honoured"),
        (body(top_k=5), "top_k = 5 cannot be honoured"),
        (body(stop=["x"]), "stop = .* cannot be honoured"),
        (body(best_of=3), "unknown parameters .'best_of'"),
        (body(prompt="text"), "Expected `array`"),
        (body(prompt=[[]]), "none empty"),
        (body(prompt=[]), "at least one prompt"),
        (body(max_tokens=0), "at least 1"),
        (body(prompt=[[VOCAB_SIZE]]), "ids outside"),
        (body(max_tokens=511), "exceed the target's window of 512"),
        (b"{", "truncated"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(folder: Path, request_body: bytes, words: str) -> None:
    ((status, answer),) = post(folder, request_body)
    assert status == 400
    assert re.search(words, answer["error"]["message"])


def start(folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "draftmill.extract.serve", str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_the_process_says_its_url_and_ends_with_its_parent(folder: Path) -> None:
    with start(folder) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline().decode().startswith(f"{READY_PREFIX}http://127.0.0.1:")
        process.stdin.close()
        assert process.wait(timeout=30) == 0


def test_a_folder_that_is_no_target_is_explained_without_a_traceback(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        assert process.stderr is not None
        stderr = process.stderr.read()
        assert process.wait(timeout=30) == 1
    assert b"no config.json" in stderr and b"Traceback" not in stderr
