"""The room's promise: whatever interrupts it and however many engines answer, the parts end in the same bytes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from completion_sets import check_parts, lines_of, records_of
from draftmill.contracts.rows import read_row
from draftmill.generate.run import run
from draftmill.settings.generate import GenerateSettings
from tiny import IM_END_ID, write_tiny_target

pytestmark = [pytest.mark.torch, pytest.mark.slow]

NUM_ROWS = 36


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), num_layers=2, hidden_size=32)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    rows = [{"id": f"r{n}", "prompt": f"question {n * n}", "family": "squares"} for n in range(NUM_ROWS)]
    rows[5] = {"id": "r5", "messages": [{"role": r, "content": r} for r in ("user", "assistant", "user")]}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n" + json.dumps(rows[0]) + "\n")
    return file


def options(target: Path, prompts: Path, output: Path, workers: int) -> dict[str, Any]:
    return {
        "input": (str(prompts),),
        "output": (str(output),),
        "target": str(target),
        "max_new_tokens": 60,
        "on_length": "keep",
        "on_repetition": "keep",  # random weights repeat themselves, and write stray think tags
        "max_broken_frac": 1.0,
        "batch_rows": 2,
        "part_rows": 3,
        "workers": workers,
        "max_dropped_frac": 0.2,
    }


def start(options: dict[str, Any]) -> "subprocess.Popen[bytes]":
    flags = [
        f for k, v in options.items() for f in (f"--{k.replace('_', '-')}", v[0] if isinstance(v, tuple) else str(v))
    ]
    command = [sys.executable, "-m", "draftmill", "generate", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def engines_of(parent: int) -> list[int]:
    """Engine processes that `parent` started."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in listed]


def await_files(folder: Path, pattern: str, count: int) -> None:
    for _ in range(3000):
        if len(list(folder.glob(pattern))) >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {count} files {pattern} in {folder}")


def await_end(pids: list[int]) -> None:
    for pid in pids:
        for _ in range(600):
            if not is_running(pid):
                break
            time.sleep(0.05)
        assert not is_running(pid), f"engine {pid} outlived its parent"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def parts(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("p*")}


@pytest.fixture(scope="module")
def undisturbed(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[GenerateSettings, Any]:
    """Settings and card of a run that nothing interrupts."""
    settings = GenerateSettings(**options(target, prompts, tmp_path_factory.mktemp("whole"), workers=1))
    return settings, run(settings)


def test_an_interrupted_and_a_killed_run_go_on_to_the_same_bytes(
    target: Path, prompts: Path, undisturbed: tuple[GenerateSettings, Any], tmp_path: Path
) -> None:
    whole, broken = Path(undisturbed[0].output[0]), tmp_path / "broken"
    with start(options(target, prompts, broken, workers=2)) as process:
        await_files(broken, "plan.json", 1)
        time.sleep(0.5)
        engines = engines_of(process.pid)
        process.send_signal(signal.SIGTERM)
        stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(stdout.splitlines()[-1])["exit_code"] == 130
    await_end(engines)

    with start(options(target, prompts, broken, workers=2)) as process:
        await_files(broken, "part-*.jsonl.zst", 2)
        engines = engines_of(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=60)
    assert len(engines) == 2
    await_end(engines)
    num_kept = len(list(broken.glob("part-*.jsonl.zst")))
    assert not (broken / "card.json").exists() and num_kept < NUM_ROWS // 3

    again = run(GenerateSettings(**options(target, prompts, broken, workers=1)))
    assert parts(broken) == parts(whole)
    assert again["content_hash"] == undisturbed[1]["content_hash"]


def test_rows_carry_what_the_target_wrote_and_the_card_accounts_for_every_line(
    undisturbed: tuple[GenerateSettings, Any],
) -> None:
    settings, card = undisturbed
    content, folder = card["content"], Path(settings.output[0])
    check_parts(folder)
    rows = [read_row(line) for record in records_of(folder) for line in lines_of(folder / record["file"])]
    lost = sum(content["dropped"].values()) + sum(content["set_aside"].values())
    assert content["rows_in"] == NUM_ROWS + 2 == content["rows"] + lost
    assert content["dropped"]["broken JSON"] == content["dropped"]["id of an earlier row"] == 1
    assert [row.id for row in rows] == [r for r in (f"r{n}" for n in range(NUM_ROWS)) if r in {row.id for row in rows}]
    for row in rows:
        for message in row.messages:
            if message["role"] == "assistant":
                assert message["prompt_token_ids"] and message["token_ids"]
        assert (row.messages[-1]["token_ids"][-1] == IM_END_ID) == (row.finish_reason == "stop")
        assert row.sampling is not None and row.sampling["temperature"] == 0.0
    answers = [m for row in rows for m in row.messages if m["role"] == "assistant"]
    assert content["tokens"] == content["completion_tokens"] == sum(len(m["token_ids"]) for m in answers)
    assert content["lengths"]["max"] == max(len(m["token_ids"]) for m in answers)

    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert run(settings) == card
    assert run(settings.model_copy(update={"workers": 2})) == card
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_a_dry_run_tells_what_is_left_and_writes_nothing(target: Path, prompts: Path, tmp_path: Path) -> None:
    settings = GenerateSettings(**options(target, prompts, tmp_path / "out", workers=1), dry_run=True)
    told = run(settings)
    assert (told["dry_run"], len(told["left"]), told["done"]) == (True, -(-(NUM_ROWS + 2) // 3), False)
    assert not (tmp_path / "out").exists()
