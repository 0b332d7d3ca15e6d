"""A local folder takes any file name, shows whole files or none, and keeps no drafts of runs that are gone."""

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from draftmill.contracts.errors import StorageError
from draftmill.storage.local import draft_of, list_folder, place, read_file, sweep_drafts, version_of, write_new
from draftmill.storage.store import open_store

ODD = ["a b.jsonl", "a%20b.jsonl", "ü.jsonl", "a+b#c?d.jsonl", "日本/x y.jsonl", "'q\"(1)&=.jsonl", ".hidden", "%2e%2e"]


def test_odd_names_are_listed_and_read(tmp_path: Path):
    for name in ODD:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    store = open_store(str(tmp_path))
    assert [file.key for file in store.files()] == sorted(ODD)
    assert [store.get(name).decode() for name in ODD] == ODD
    assert [store.size(name) for name in ODD] == [len(name.encode()) for name in ODD]
    assert [store.span(name, 1, 4) for name in ODD] == [name.encode()[1:4] for name in ODD]


def test_a_name_that_cannot_be_written_down_is_named(tmp_path: Path):
    (tmp_path / os.fsdecode(b"\xff.jsonl")).touch()
    with pytest.raises(StorageError, match="not UTF-8"):
        list_folder(tmp_path)


def test_a_dangling_link_is_named(tmp_path: Path):
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageError, match=r"a\.jsonl cannot be read: No such file"):
        list_folder(tmp_path)


def test_what_is_no_file_is_passed_over_where_only_files_of_ours_are_looked_for(tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "ours").write_bytes(b"abc")
    (tmp_path / "checkpoints" / "latest").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / os.fsdecode(b"\xff")).write_bytes(b"x")
    assert {k: v for k, v in open_store(str(tmp_path)).sizes().items() if k.isascii()} == {"checkpoints/ours": 3}


def test_any_change_of_a_file_shows_in_its_version(tmp_path: Path):
    path, seen = tmp_path / "a", []
    path.write_bytes(b"abc")
    seen.append(version_of(path))
    os.utime(path, ns=(1, 1))
    seen.append(version_of(path))
    (tmp_path / "b").write_bytes(b"abd")
    os.utime(tmp_path / "b", ns=(1, 1))
    (tmp_path / "b").replace(path)
    seen.append(version_of(path))
    assert len(set(seen)) == 3


@pytest.mark.parametrize("is_linked", [True, False])
def test_a_file_is_placed_whole(tmp_path: Path, is_linked: bool):
    source = tmp_path / "source" if is_linked else Path("/dev/shm") / f"draftmill-{os.getpid()}"
    source.write_bytes(b"abc" * 1000)
    target = tmp_path / "deep" / "target"
    for _ in range(2):
        place(source, target)
    assert target.read_bytes() == source.read_bytes() and [f.name for f in target.parent.iterdir()] == ["target"]
    source.unlink()
    assert target.read_bytes() == b"abc" * 1000


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "source").touch()
    with pytest.raises(StorageError, match=r"file/x cannot be written: File exists"):
        place(tmp_path / "source", tmp_path / "file" / "x")


def test_of_many_writers_one_wins(tmp_path: Path):
    # Drafts are told apart by process: threads of one never write the same file.
    command = "import sys; from pathlib import Path; from draftmill.storage.local import write_new as w; "
    command += f"print(w(Path({str(tmp_path / 'plan')!r}), sys.argv[1].encode() * 100_000))"
    with ThreadPoolExecutor(4) as starters:
        done = list(
            starters.map(
                lambda i: subprocess.run([sys.executable, "-c", command, str(i)], capture_output=True, text=True),
                range(4),
            )
        )
    winners = [i for i, run in enumerate(done) if run.stdout.strip() == "True"]
    assert len(winners) == 1 and (tmp_path / "plan").read_text() == str(winners[0]) * 100_000
    assert write_new(tmp_path / "plan", b"late") is False


def test_drafts_of_processes_that_are_gone_are_swept(tmp_path: Path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = tmp_path / f"part-00000.arrow.tmp-{platform.node()}-{gone.pid}"
    elsewhere = tmp_path / f"part-00001.arrow.tmp-another-host-{gone.pid}"
    ours = draft_of(tmp_path / "part-00002.arrow")
    for path in (left, elsewhere, ours, tmp_path / "part-00003.arrow"):
        path.touch()
    exported = tmp_path / f"drafter.tmp-{platform.node()}-{gone.pid}"
    exported.mkdir()
    (exported / "config.json").touch()
    sweep_drafts(tmp_path)
    assert [file.key for file in list_folder(tmp_path)] == ["part-00003.arrow"]
    assert not exported.exists() and not left.exists() and elsewhere.exists() and ours.exists()


def test_a_draft_is_told_by_the_end_of_its_name_alone(tmp_path: Path):
    for name in ("x.tmp-y.jsonl", "a.tmp-1", draft_of(tmp_path / "a").name):
        (tmp_path / name).touch()
    assert [file.key for file in list_folder(tmp_path)] == ["a.tmp-1", "x.tmp-y.jsonl"]


def test_linked_folders_are_listed_once_and_loops_end(tmp_path: Path):
    far, folder = tmp_path / "far", tmp_path / "in"
    for made in (far, folder):
        made.mkdir()
        (made / "a.jsonl").touch()
    (folder / "linked").symlink_to(far)
    (folder / "once more").symlink_to(far)
    (far / "back").symlink_to(folder)
    assert [file.key for file in list_folder(folder)] == ["a.jsonl", "linked/a.jsonl"]


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "p.jsonl")
    (tmp_path / "folder").mkdir()
    assert read_file(tmp_path / "p.jsonl") is None and read_file(tmp_path / "folder") is None
    with pytest.raises(StorageError, match=r"p\.jsonl is neither a file nor a folder"):
        list_folder(tmp_path)
