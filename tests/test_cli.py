"""Promise: flags win over the recipe, a wrong key or flag is named with its cure, a failure ends in a JSON line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftmill.cli import main, parse
from draftmill.contracts.errors import RecipeError
from draftmill.rooms import ROOMS
from draftmill.settings.recipes import load_recipe, room_values
from draftmill.settings.tokenize import TokenizeSettings

RECIPE = """
target = "TARGET"
prompts = "prompts.jsonl"
output = ["runs/a", "s3://bucket/a"]

[generate]
max_new_tokens = 33
held_out_frac = 0.25
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE)
    return file


def closing(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_a_recipe_gives_places_and_values_and_flags_win(recipe: Path) -> None:
    settings = parse("generate", ["--recipe", str(recipe), "--split", "train"])
    assert settings.model_dump()["output"] == ("runs/a/completions/train", "s3://bucket/a/completions/train")
    assert settings.model_dump()["max_new_tokens"] == 33
    flagged = parse(
        "generate", ["--output", "elsewhere", f"--recipe={recipe}", "--max_new_tokens=7", "--split=held-out"]
    )
    assert flagged.model_dump()["output"] == ("elsewhere",)
    assert flagged.model_dump()["split"] == "held-out"
    placed = parse("generate", [f"--recipe={recipe}", "--split=held-out"])
    assert placed.model_dump()["output"][0] == "runs/a/completions/held-out"
    assert flagged.model_dump()["max_new_tokens"] == 7


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[generate]\nmax_new_token = 3", "unknown key 'max_new_token'; did you mean 'max_new_tokens'?"),
        ("[generates]\n", "unknown key 'generates'; did you mean 'generate'?"),
        ("[generate]\nmax_new_tokens = 'many'", "max_new_tokens = 'many'"),
        ("[generate]\nmax_new_tokens = 0", "greater than or equal to 1"),
        ("[generate\n", "is not TOML"),
    ],
)
def test_a_wrong_recipe_is_named_with_its_cure(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.toml").write_text('target = "t"\nprompts = "p"\noutput = "o"\n' + text)
    assert main(["generate", "--recipe", str(tmp_path / "wrong.toml"), "--split", "train"]) == 2
    assert says in str(closing(capsys)["error"])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["generat"], "did you mean 'generate'?"),
        (["generate", "--recipe", "typo.toml"], "typo.toml: no such recipe file"),
        (["generate", "--recipe"], "--recipe needs a file"),
        (["generate", "--recipe", "recipes/demo.toml"], "give --split train"),
        (["generate"], "cannot be followed"),
        (["generate", "--max-new-tokens", "x", "--input", "a", "--output", "b", "--target", "c"], "cannot be followed"),
        (["generate", f"--part-rows={10**30}", "--input", "a", "--output", "b", "--target", "c"], "--part-rows: Input"),
        (["generate", "--min-timeout-s=inf", "--input", "a", "--output", "b", "--target", "c"], "a finite number"),
        (["run", "--recipe", "typo.toml"], "typo.toml: no such recipe file"),
    ],
)
def test_a_wrong_command_ends_in_a_json_line_and_exit_2(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    last = closing(capsys)
    assert says in str(last["error"])
    assert last["exit_code"] == 2


def test_a_value_that_a_setting_refuses_is_told_in_one_readable_line(capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--input", "a", "--output", "b", "--tokenizer", "c"]
    assert main(["tokenize", *needed, "--shard", "0/2", "--max-tokens", "5"]) == 2
    told = capsys.readouterr()
    assert told.err == "draftmill tokenize: --shard 0/2: give i/n with i from 1 to n, for example 1/4\n"
    assert json.loads(told.out.splitlines()[-1])["error"].startswith("--shard 0/2: ")
    assert main(["tokenize", *needed, "--max-tokens", "1"]) == 2
    assert capsys.readouterr().err == "draftmill tokenize: --max-tokens: Input should be greater than or equal to 2\n"


def test_a_reader_of_stdout_that_has_left_costs_nothing_but_the_line() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "draftmill", "nonsense"], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert done.returncode == 2
    assert "nonsense" in done.stderr and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("args", [["--version"], ["--help"], ["nonsense"]])
def test_a_stdout_that_takes_nothing_is_told_in_a_line_and_is_a_failure(args: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "draftmill", *args]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == (2 if args == ["nonsense"] else 1)
    assert "the last line is lost (No space left on device: stdout)" in done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_a_home_folder_that_nobody_has_is_named_by_every_room(capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = "~nobody-of-that-name/x"
    for args in (
        ["tokenize", "--input", nowhere, "--output", "o", "--tokenizer", nowhere],
        ["export", "--checkpoint", nowhere, "--output", "o"],
        ["report", "--input", nowhere, "--output", "o"],
        ["estimate", "--target", nowhere],
        ["generate", "--input", f"{nowhere}.jsonl", "--output", "o", "--target", "t"],
    ):
        assert main(args) == 2, args
        assert "no home folder" in str(closing(capsys)["error"])


def test_every_room_has_readable_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    for name, room in ROOMS.items():
        assert f"  {name}" in page
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        assert "--dry-run" in text
        undescribed = [key for key, field in room.model().model_fields.items() if not field.description]
        assert not undescribed, f"{name}: a field's help is the line below it; missing for {undescribed}"


def test_a_bad_key_of_a_late_room_is_found_before_the_first_room_runs(recipe: Path) -> None:
    recipe.write_text(RECIPE + "\n[export]\nlayot = 'zlab'\n")
    assert main(["run", "--recipe", str(recipe)]) == 2


def test_a_dry_run_of_the_line_shows_every_room_and_writes_nothing(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--recipe", str(recipe), "--dry-run", "--output", str(tmp_path / "run")]) == 0
    resolved = closing(capsys)["recipe"]
    assert isinstance(resolved, dict)
    assert resolved["tokenize"]["input"] == f"{tmp_path}/run/completions/train"
    assert resolved["generate held-out"]["max_new_tokens"] == 33
    assert resolved["train"]["eval_input"] == [f"{tmp_path}/run/completions/held-out"]
    assert not (tmp_path / "run").exists()


def test_values_of_a_table_are_checked_one_by_one(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="held_out_frac = 7"):
        room_values(load_recipe(recipe), "generate", ROOMS["generate"].model(), split="train", held_out_frac=7)


# A room whose work is interrupted by a signal while a task of its is at work.
TERMINATED = """
import asyncio, os, signal, sys
import draftmill.generate.run as room
from draftmill.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell are started without it

async def ask():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
    except BaseException as end:
        print("ended by", type(end).__name__, file=sys.stderr)
        raise

async def ask_all():
    async with asyncio.TaskGroup() as group:
        group.create_task(ask())

room.run = lambda settings: asyncio.run(ask_all())
sys.exit(main(["generate", "--input", "p", "--output", "o", "--target", "t"]))
"""


def test_a_run_that_is_terminated_has_its_event_loop_end_in_order() -> None:
    """The signal comes while some task is at work: it must not be that task's error."""
    done = subprocess.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert "ended by CancelledError" in done.stderr and "Traceback" not in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["exit_code"] == 130


def test_an_empty_name_is_refused_rather_than_taken_for_the_current_folder(capsys: pytest.CaptureFixture[str]):
    for given in (["--input", "", "--output", "o"], ["--input", "i", "--output", ""]):
        assert main(["tokenize", *given, "--tokenizer", "t"]) == 2
        assert "empty; name a folder or URL" in capsys.readouterr().err


@pytest.mark.parametrize("said", ["false", "False", "FALSE"])
def test_a_template_s_switch_is_a_truth_value_however_it_is_spelt(said: str):
    given = {"input": "i", "output": ("o",), "tokenizer": "t", "template_kwargs": {"enable_thinking": said, "n": "1"}}
    assert TokenizeSettings(**given).template_kwargs == {"enable_thinking": False, "n": "1"}
