"""Promise: one recipe takes prompts to a measured, exported drafter; killed and run again it ends in the same bytes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tiny import NUM_TOKENS, write_tiny_target

pytestmark = [pytest.mark.torch, pytest.mark.slow]

NUM_PROMPTS = 40
RECIPE = """
target = "{target}"
prompts = "{prompts}"
output = "{output}"

[generate]
max_new_tokens = 20
held_out_frac = 0.3
batch_rows = 4
part_rows = 8
on_length = "keep"
max_broken_frac = 1.0

[tokenize]
part_bytes = 6000
max_dropped_frac = 0.9

[train]
max_dropped_frac = 0.9
num_layers = 1
num_taps = 2
block_size = 4
num_anchors = 64
max_tokens = 256
rows_per_step = 1
num_steps = 12
save_every = 4
loss = "d-pace"

[evaluate]
decode_prompts = 3
decode_prompts_untrained = 2
max_new_tokens = 12
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # One row more than tokens: the mask id. Random weights may answer with it, so some rows are dropped.
    return write_tiny_target(tmp_path_factory.mktemp("target"), vocab_size=NUM_TOKENS + 1)


def write_recipe(folder: Path, target: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.jsonl"
    rows = [{"id": f"p{i}", "family": f"f{i % 2}", "prompt": f"say {i} {chr(97 + i % 26)}"} for i in range(NUM_PROMPTS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(target=target, prompts=prompts, output=folder / "run"))
    return recipe


def start(recipe: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "draftmill", "run", "--recipe", str(recipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def closing_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.strip().splitlines()[-1])


def made(run: Path) -> dict[str, bytes]:
    """Every part, record, plan and checkpoint below a run; cards by their hashed half alone."""
    found = {}
    for file in sorted(p for p in run.rglob("*") if p.is_file()):
        name = str(file.relative_to(run))
        if file.name == "card.json":
            found[name] = json.dumps(json.loads(file.read_bytes())["content"], sort_keys=True).encode()
        elif file.name.startswith("part-") or file.name == "plan.json" or "checkpoints" in file.parts:
            found[name] = file.read_bytes()
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, target: Path) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe = write_recipe(folder, target)
    return folder / "run", closing_line(start(recipe))


def test_the_line_accounts_for_every_row_and_measures_losslessly(undisturbed: tuple[Path, dict[str, Any]]) -> None:
    run, closing = undisturbed
    rows = closing["rows"]
    # A target of random weights writes think tags, and ids that its tokenizer does not know.
    left_out = Counter(closing["left_out"]["generate train"]) + Counter(closing["left_out"]["generate held-out"])
    assert left_out.pop("broken JSON") == 1
    assert rows["generate train"] + rows["generate held-out"] + left_out.total() == NUM_PROMPTS
    assert closing["lossless"] is True
    assert 1.0 <= closing["tau_untrained"] <= 4 and 1.0 <= closing["tau"] <= 4
    assert (Path(closing["export"]) / "model.safetensors").is_file()
    assert (run / "train" / "metrics.jsonl").read_text().count("\n") == 12


def test_a_finished_run_recomputes_nothing(undisturbed: tuple[Path, dict[str, Any]], target: Path) -> None:
    run, closing = undisturbed
    before = times(run)
    again = closing_line(start(run.parent / "recipe.toml"))
    assert times(run) == before
    assert {k: again[k] for k in ("tau", "tau_micro", "rows", "tokens")} == {
        k: closing[k] for k in ("tau", "tau_micro", "rows", "tokens")
    }


def times(run: Path) -> dict[Path, int]:
    """When every file of a run was last written; the report is drawn anew from whatever lies there."""
    return {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file() and p.name != "report.html"}


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Until a file of the run appears (or the process ends): kills fall at places, not at times."""
    while not path.exists() and process.poll() is None:
        time.sleep(0.01)


@pytest.mark.parametrize(
    "moments",
    [
        (
            "completions/train/part-00000.json",
            "samples/part-00000.json",
            "train/checkpoints/step-00000004/checkpoint.json",
        )
    ],
)
def test_killed_three_times_it_ends_in_the_same_bytes(
    moments: tuple[str, ...], undisturbed: tuple[Path, dict[str, Any]], target: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, target)
    # The plan names the prompts by their file's content, so another folder is the same run.
    for moment in moments:
        process = start(recipe)
        wait_for(tmp_path / "run" / moment, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    closing_line(start(recipe))
    assert made(tmp_path / "run") == made(undisturbed[0])
