"""What is done is neither lost nor doubled: torn, harmed and doubled lines cost the prompt they are of, no other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftmill.contracts.cards import Dropped
from draftmill.contracts.errors import StorageError
from draftmill.generate.conversation import Kept
from draftmill.generate.figures import AnswerFigures
from draftmill.generate.spool import SpoolFile, alone_in, open_spool
from draftmill.storage.store import open_store

IDS = ["a", "7", "ünï/..\\ \t\n\u2028", "x" * 10_000]


def kept(row_id: str, text: str = "row", reason: str | None = None) -> Kept:
    return Kept(row_id, reason, f'{{"text":"{text}"}}\n'.encode(), AnswerFigures(answers=1, completion_tokens=3))


def filled(folder: Path, *ends: Kept | Dropped) -> SpoolFile:
    file = SpoolFile(folder / "part-00000.jsonl")
    for end in ends or map(kept, IDS):
        file.append(end)
    return file


def test_what_was_written_is_read_back_whatever_its_id(tmp_path: Path) -> None:
    file = filled(tmp_path, *map(kept, IDS), kept("s", reason="cut"), Dropped(file="f", line=1, id="d", reason="long"))
    places = file.places()
    assert list(places) == [*IDS, "s", "d"]
    assert [place.entry.kind for place in places.values()] == ["row"] * 4 + ["aside", "dropped"]
    assert {file.row(places[row_id]) for row_id in IDS} == {b'{"text":"row"}\n'}
    assert places["a"].entry.figures == AnswerFigures(answers=1, completion_tokens=3)


def test_cut_at_any_byte_it_loses_the_line_that_was_cut_and_no_other(tmp_path: Path) -> None:
    whole = filled(tmp_path, *map(kept, "abc")).path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 0x0A]
    for size in range(len(whole) + 1):
        file = SpoolFile(tmp_path / "cut.jsonl")
        file.path.write_bytes(whole[:size])
        file.mend()
        num_whole = sum(end <= size for end in ends)
        assert list(file.places()) == list("abc")[:num_whole]
        # The next line does not touch what is left of the torn one (elizaOS/eliza#30878).
        file.append(kept("new"))
        assert list(file.places()) == [*list("abc")[:num_whole], "new"]


def test_a_harmed_line_costs_its_own_prompt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = filled(tmp_path, *map(kept, "abc"))
    whole, said = file.path.read_bytes(), file.places()
    second = whole.index(b"\n") + 1
    for offset in range(second, whole.index(b"\n", second)):
        file.path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        found = file.places()
        assert found.keys() == {"a", "c"}, offset
        assert all(found[row_id] == said[row_id] for row_id in "ac"), offset
        assert all(file.row(place) == b'{"text":"row"}\n' for place in found.values()), offset
    file.path.write_bytes(whole[:second] + b"\0" * 50 + b"\n" + whole[second:])
    assert list(file.places()) == list("abc")
    assert "harmed line" in caplog.text


def test_an_id_twice_counts_once_with_its_first_row(tmp_path: Path) -> None:
    file = filled(tmp_path, kept("a", "first"), kept("b"), kept("a", "second"))
    assert file.row(file.places()["a"]) == b'{"text":"first"}\n' and len(file.places()) == 2


def test_a_full_disk_is_told_and_leaves_no_half_line(tmp_path: Path) -> None:
    # In a process of its own: the limit on the size of files is the process's.
    story = f"""
import resource
from pathlib import Path
from test_spool import kept, SpoolFile
from draftmill.contracts.errors import StorageError
file = SpoolFile(Path({str(tmp_path)!r}) / "part-00000.jsonl")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
count = 0
try:
    while True:
        file.append(kept(str(count)))
        count += 1
except StorageError as error:
    print(error)
print(count)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", story], capture_output=True, text=True, env=env)
    told, count = done.stdout.rsplit("\n", 2)[0], int(done.stdout.split()[-1])
    assert "make room there" in told and "run the same command again" in told, done.stderr
    file = SpoolFile(tmp_path / "part-00000.jsonl")
    assert 3 < count == len(file.places()) and file.path.read_bytes().endswith(b"\n")


def test_two_runs_of_one_set_exclude_each_other_and_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    stores = [open_store(str(tmp_path / "out"), create=True)]
    with open_spool(str(tmp_path), "plan", stores) as spool:
        assert spool.folder.parent == tmp_path
        with pytest.raises(StorageError, match="another run of draftmill generate is at work"):
            open_spool(str(tmp_path), "plan", stores).__enter__()
        with open_spool(str(tmp_path), "another plan", stores) as other:
            assert other.folder != spool.folder
        with open_spool(str(tmp_path), "plan", [open_store(str(tmp_path / "elsewhere"), create=True)]) as other:
            assert other.folder != spool.folder
    held = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\nfrom pathlib import Path\n"
         f"from draftmill.generate.spool import alone_in\nwith alone_in([Path({str(tmp_path)!r})]):\n"
         "    print('held', flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert held.stdout is not None and held.stdout.readline() == b"held\n"
    with pytest.raises(StorageError, match="at work"), alone_in([tmp_path]):
        pass
    held.kill()
    held.wait()
    with alone_in([tmp_path]):
        pass
