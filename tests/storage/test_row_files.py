"""Rows are the same out of every kind of file, cut at line ends alone; what is cut or no such file is refused."""

import gzip
import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from draftmill.contracts.errors import InputError
from draftmill.contracts.rows import read_row
from draftmill.storage.row_files import find_row_file, find_row_files, numbered_lines, write_lines

# The line separators that str.splitlines cuts at, as text.
ROWS = [
    {"id": "a\u2028b", "messages": [{"role": "user", "content": "one\u2028two\u2029three\u0085four\x0bfive"}]},
    {"id": "ü/1", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
]
LINES = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]
TEXT = LINES[0] + b"\n\n  \r\n" + LINES[1]  # the last line has no end


def write(folder: Path, name: str) -> Path:
    file = folder / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    elif name.endswith(".gz"):
        file.write_bytes(gzip.compress(TEXT[:40]) + gzip.compress(TEXT[40:]))
    elif name.endswith(".zst"):
        pack = zstandard.ZstdCompressor().compress
        file.write_bytes(pack(TEXT[:40]) + pack(TEXT[40:]))
    else:
        file.write_bytes(TEXT)
    return file


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.jsonl.zst", "p.parquet"])
def test_every_kind_of_file_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    found = find_row_file(str(write(tmp_path, name)))
    content = found.path.read_bytes()
    assert found.file.identity == f"sha256:{hashlib.sha256(content).hexdigest()}" and found.file.key == name
    numbered = list(found.lines())
    assert [number for number, _ in numbered] == ([1, 2] if name.endswith("parquet") else [1, 4])
    rows = [read_row(line) for _, line in numbered]
    assert [row.id for row in rows] == ["a\u2028b", "ü/1"]
    assert [m["content"] for row in rows for m in row.messages] == [m["content"] for r in ROWS for m in r["messages"]]


@pytest.mark.parametrize("name", ["p.jsonl.gz", "p.jsonl.zst", "p.parquet"])
@pytest.mark.parametrize("harm", ["cut", "something else"])
def test_a_file_that_is_cut_or_something_else_is_refused(name: str, harm: str, tmp_path: Path) -> None:
    file = write(tmp_path, name)
    file.write_bytes(file.read_bytes()[:-5] if harm == "cut" else b"<html>not found</html>")
    with pytest.raises(InputError, match=r"p\.(jsonl|parquet).*fetch it again"):
        list(numbered_lines(file, name))


def test_columns_that_json_has_no_form_for_cost_no_row(tmp_path: Path) -> None:
    odd = {"at": pa.array([1, None], pa.timestamp("ns")), "took": pa.array([1, 2], pa.duration("ns"))}
    pq.write_table(pa.table({"id": ["a", "b"], "prompt": ["x", "y"], **odd}), tmp_path / "p.parquet")
    assert [read_row(line).id for _, line in numbered_lines(tmp_path / "p.parquet", "p.parquet")] == ["a", "b"]


def test_a_date_that_cannot_be_is_told_with_the_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a"], "on": pa.array([10**7], pa.date32())}), tmp_path / "p.parquet")
    with pytest.raises(InputError, match=r"p\.parquet.*date value out of range"):
        list(numbered_lines(tmp_path / "p.parquet", "p.parquet"))


def test_files_of_one_name_are_told_apart_by_as_many_folders_as_it_takes(tmp_path: Path) -> None:
    for folder in ("a/x", "b/x", "b/y"):
        (tmp_path / folder).mkdir(parents=True)
    urls = [str(write(tmp_path / folder, "p.jsonl")) for folder in ("a/x", "b/x", "b/y")]
    assert [found.file.key for found in find_row_files(urls)] == ["a/x/p.jsonl", "b/x/p.jsonl", "b/y/p.jsonl"]
    assert [found.file.key for found in find_row_files(urls[:1])] == ["p.jsonl"] and find_row_files([]) == ()


@pytest.mark.parametrize("name", ["part.jsonl", "part.jsonl.gz", "part.jsonl.zst"])
def test_the_same_lines_give_the_same_bytes_and_are_read_back(name: str, tmp_path: Path) -> None:
    lines = [line + b"\n" for line in LINES] * 100
    first = write_lines(tmp_path / name, lambda: iter(lines))
    (tmp_path / "again").mkdir()
    again = write_lines(tmp_path / "again" / name, lambda: iter(lines))
    assert (first.bytes, first.sha256) == (again.bytes, again.sha256) == (first.path.stat().st_size, first.sha256)
    assert [line + b"\n" for _, line in numbered_lines(first.path, name)] == lines
    nothing = write_lines(tmp_path / f"empty-{name}", lambda: iter(()))
    assert list(numbered_lines(nothing.path, name)) == []


def test_a_packed_file_is_one_frame_that_any_reader_reads_whole(tmp_path: Path) -> None:
    # Some readers stop after the first frame, and some want to know the size beforehand.
    written = write_lines(tmp_path / "p.jsonl.zst", lambda: iter([b"x" * 1000 + b"\n"] * 5000))
    assert len(zstandard.ZstdDecompressor().decompress(written.path.read_bytes())) == 5000 * 1001
