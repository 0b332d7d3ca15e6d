"""`--also jsonl` writes what SpecForge and speculators read as tokenized already: once, and beside an older set too."""

import json
import resource
from pathlib import Path

import pyarrow as pa
import pytest

import completions
from completions import row, write_rows
from draftmill.contracts.errors import StorageError
from draftmill.tokenize.jsonl import write_jsonl
from draftmill.tokenize.run import run
from tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with a tokenizer, rows and their samples in several parts."""
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    write_tiny_tokenizer(tmp_path / "tokenizer")
    write_rows(tmp_path / "a.jsonl", [row(i) for i in range(9)])
    run(completions.settings(tmp_path, tmp_path / "a.jsonl", tmp_path / "tokenizer", part_bytes=700))
    return tmp_path


def test_the_lines_are_the_samples(made: Path):
    before = {file.name: file.read_bytes() for file in (made / "samples").iterdir()}
    run(completions.settings(made, made / "a.jsonl", made / "tokenizer", part_bytes=700, also=("jsonl",)))
    assert before == {file.name: file.read_bytes() for file in (made / "samples").iterdir() if file.is_file()}
    shards = sorted((made / "samples").glob("part-*.arrow"))
    assert len(shards) > 1
    for shard in shards:
        lines = (made / "samples" / "jsonl" / f"{shard.stem}.jsonl").read_bytes().splitlines()
        samples = pa.ipc.open_stream(shard.read_bytes()).read_all().to_pylist()
        wanted = [{"input_ids": s["input_ids"], "loss_mask": list(map(int, s["loss_mask"]))} for s in samples]
        assert [json.loads(line) for line in lines] == wanted


def test_a_file_that_is_there_is_left_alone_and_a_lost_one_written_again(made: Path):
    chosen = completions.settings(made, made / "a.jsonl", made / "tokenizer", part_bytes=700, also=("jsonl",))
    run(chosen)
    first, second = sorted((made / "samples" / "jsonl").iterdir())[:2]
    whole, kept = first.read_bytes(), second.stat().st_mtime_ns
    first.unlink()
    run(chosen)
    assert first.read_bytes() == whole and second.stat().st_mtime_ns == kept


def test_a_full_disk_is_named_and_the_next_run_goes_on(made: Path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))  # on the size of files: it stands for a full disk
    try:
        with pytest.raises(StorageError, match=rf"{made}/cache/spool/.* cannot be written: File too large; free some"):
            write_jsonl(str(made / "samples"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((made / "cache").rglob("lines")), "what there was no room for makes room"
    write_jsonl(str(made / "samples"))
    assert len(list((made / "samples" / "jsonl").iterdir())) > 1 and not list((made / "cache" / "spool").iterdir())


def test_datasets_still_reads_the_shards_and_reads_the_lines(made: Path):
    datasets = pytest.importorskip("datasets")
    run(completions.settings(made, made / "a.jsonl", made / "tokenizer", part_bytes=700, also=("jsonl",)))
    shards = datasets.load_from_disk(str(made / "samples"))
    files = sorted(map(str, (made / "samples" / "jsonl").iterdir()))
    lines = datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(made / "hf"))
    assert lines["input_ids"] == shards["input_ids"]
    assert lines["loss_mask"] == [list(map(int, mask)) for mask in shards["loss_mask"]]


def test_specforge_s_own_reader_takes_them(made: Path):
    reader = pytest.importorskip("specforge.data.prompt_builder")
    run(completions.settings(made, made / "a.jsonl", made / "tokenizer", also=("jsonl",), output=(str(made / "2"),)))
    (file,) = (made / "2" / "jsonl").iterdir()
    tasks = reader.prepare_prompt_tasks(
        file,
        None,
        chat_template=None,
        max_length=10_000,
        is_preformatted=False,
        train_only_last_turn=False,
        cache_dir=None,
        cache_key=None,
        num_proc=None,
    )
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    assert [dict(task["payload"]) for task in tasks] == lines and len(lines) == 9
