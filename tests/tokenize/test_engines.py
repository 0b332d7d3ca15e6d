"""However a plan's parts are spread over runs and machines, the set ends in the same bytes as one run's."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import completions
from completions import row, write_rows
from draftmill.contracts.errors import DraftmillError
from draftmill.settings.tokenize import TokenizeSettings
from draftmill.tokenize.run import run
from tiny_tokenizer import write_tiny_tokenizer

LENIENT = {"max_spike_frac": 1, "max_duplicate_frac": 1, "max_dropped_frac": 1}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    write_tiny_tokenizer(tmp_path / "tokenizer")
    for number in range(3):  # ids repeat over files, and each file makes three parts
        rows: list[dict[str, Any] | bytes] = [row(i, id=f"{number}-{i}") for i in range(12)]
        rows[3] = b'{"torn'
        rows[7] = row(7, id=f"{(number + 2) % 3}-2")
        write_rows(tmp_path / "in" / f"{number}.jsonl", rows)
    return tmp_path


def _settings(place: Path, output: str, **changes: Any) -> TokenizeSettings:
    given = {"output": (str(place / output),), "part_bytes": 1_200, **LENIENT, **changes}
    return completions.settings(place, place / "in", place / "tokenizer", **given)


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != "card.json"}


def test_shards_run_in_any_order_make_what_one_run_makes(place: Path):
    whole = run(_settings(place, "whole"))
    for number, order in enumerate(((1, 2, 3), (3, 1, 2))):
        output = f"shards-{number}"
        for which in order:
            told = run(_settings(place, output, shard=f"{which}/3"))
            if which != order[-1]:
                assert told["left"] and not (place / output / "card.json").exists()
        assert told["content_hash"] == whole["content_hash"]
        assert _files(place / output) == _files(place / "whole")


def test_a_part_is_closed_as_soon_as_all_before_it_are_known(place: Path):
    run(_settings(place, "out", shard="2/3"))
    records = sorted(file.name for file in (place / "out").glob("part-*.json"))
    assert records == [] and len(list((place / "out").glob("*.rows"))) == 3
    told = run(_settings(place, "out", shard="1/3"))
    assert sorted(file.name for file in (place / "out").glob("part-*.json")) == ["part-00000.json", "part-00001.json"]
    assert told["left"][0] == "part-00002"


def test_a_shard_run_again_makes_nothing_twice(place: Path):
    run(_settings(place, "out", shard="2/3"))
    before = {file.name: file.stat().st_mtime_ns for file in (place / "out").iterdir()}
    run(_settings(place, "out", shard="2/3"))
    assert {file.name: file.stat().st_mtime_ns for file in (place / "out").iterdir()} == before


def test_a_run_without_a_shard_takes_over_what_shards_left(place: Path):
    run(_settings(place, "out", shard="2/3"))
    run(_settings(place, "whole"))
    run(_settings(place, "out"))
    assert _files(place / "out") == _files(place / "whole")


@pytest.mark.parametrize("shard", ["0/3", "4/3", "1", "a/b", "-1/3"])
def test_a_shard_that_cannot_be_is_refused(place: Path, shard: str):
    with pytest.raises(ValueError, match="shard"):
        _settings(place, "out", shard=shard)


def test_ray_makes_what_one_run_makes(place: Path):
    pytest.importorskip("ray")
    whole = run(_settings(place, "whole"))
    made = run(_settings(place, "out", engine="ray", tasks=2, task_memory_gb=1))
    assert made["content_hash"] == whole["content_hash"]
    assert _files(place / "out") == _files(place / "whole")


SBATCH = """#!/bin/bash
# What a queue does: keeps the script, and runs it once for every member of its array.
export SLURM_NODELIST=here
for script; do :; done
for option; do [[ $option == --export=ALL,* ]] && export "${option#--export=ALL,}"; done
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
for task in $(seq 0 "${last:-0}"); do
  SLURM_ARRAY_TASK_ID=$task SLURM_JOB_ID=7 bash "$script" >> "$QUEUE_LOG" 2>&1 || exit 1
done
echo Submitted batch job 7
"""
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -n ]] && shift; shift; done
exec "$@"
"""
SCONTROL = "#!/bin/bash\necho here\n"


@pytest.fixture
def queue(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The three commands of Slurm that are used, by hand: a queue that runs each job at once."""
    commands = place / "bin"
    commands.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("QUEUE_LOG", str(place / "queue.log"))
    return place / "queue.log"


def test_slurm_s_script_makes_what_one_run_makes(place: Path, queue: Path):
    pytest.importorskip("datatrove")
    run(_settings(place, "whole"))
    chosen = _settings(
        place, "out", engine="slurm", slurm_partition="cpu", slurm_time="01:00:00", tasks=2, task_cores=2
    )
    # As a user calls it: the process that submits is not the one that makes.
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in chosen.model_dump(exclude_defaults=True).items()]
    flags = [flag for flag in flags if not flag.startswith("--output")] + [f"--output={chosen.output[0]}"]
    command = [sys.executable, "-c", "import sys; from draftmill.cli import main; sys.exit(main(sys.argv[1:]))"]
    done = subprocess.run([*command, "tokenize", *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + (queue.read_text() if queue.exists() else "")
    script = next((place / "cache" / "engines").glob("*/launch_script.slurm")).read_text()
    for line in ("--partition=cpu", "--time=01:00:00", "--array=0-1", "--cpus-per-task=2"):
        assert f"#SBATCH {line}" in script
    assert _files(place / "out") == _files(place / "whole") and (place / "out" / "card.json").exists()


def test_an_engine_without_a_place_or_with_a_shard_is_refused_before_anything_is_written(place: Path):
    with pytest.raises(ValueError, match="--slurm-partition"):
        _settings(place, "out", engine="slurm")
    with pytest.raises(ValueError, match="an engine's tasks are the shards"):
        _settings(place, "out", engine="ray", shard="1/2")


def test_a_host_without_slurm_is_told_what_else_there_is(place: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("datatrove")
    monkeypatch.setenv("PATH", str(place))
    with pytest.raises(DraftmillError, match=r"no sbatch on this host: .* or start --shard 1/n"):
        run(_settings(place, "out", engine="slurm", slurm_partition="cpu"))


def test_a_shard_tells_how_many_parts_others_have_to_make(place: Path, capsys: pytest.CaptureFixture[str]):
    told = run(_settings(place, "out", shard="2/3"))
    ours, others = ["part-00001", "part-00004", "part-00007"], [0, 2, 3, 5, 6, 8]
    assert told["left"] == [f"part-{number:05d}" for number in others] and told["to_close"] == ours
    assert "6 of 9 parts are for other runs to make; 3 are made" in capsys.readouterr().err


def test_a_dry_run_of_a_shard_tells_what_of_its_own_is_left(place: Path, capsys: pytest.CaptureFixture[str]):
    dry = _settings(place, "out", shard="2/3", dry_run=True)
    assert run(dry)["left"] == ["part-00001", "part-00004", "part-00007"]
    run(_settings(place, "out", shard="2/3"))
    assert run(dry)["left"] == []
    assert "0 of 3 parts of shard 2/3 are left to make" in capsys.readouterr().err
    assert len(run(_settings(place, "out", dry_run=True))["left"]) == 9, "none is closed yet"


def test_a_set_that_is_whole_already_is_told_to_people(place: Path, capsys: pytest.CaptureFixture[str]):
    card = run(_settings(place, "out"))
    capsys.readouterr()
    assert run(_settings(place, "out")) == card
    assert f"out: complete, {card['content']['samples']} samples of 36 rows" in capsys.readouterr().err
