"""Lines are cut at byte 0x0A alone, numbered, chunked by content; a broken or changed file is an error naming it."""

import gzip
import os
import random
from pathlib import Path

import pyarrow as pa
import pytest

from draftmill.contracts.errors import StorageError
from draftmill.storage.local import version_of
from draftmill.tokenize.lines import CHUNK_BYTES, LocalPiece, line_chunks


def _piece(path: Path, data: bytes, start: int = 0, stop: int | None = None) -> LocalPiece:
    path.write_bytes(data)
    stop = len(data) if stop is None else stop
    return LocalPiece(path=str(path), key=path.name, start=start, stop=stop, version="")


def _lines(piece: LocalPiece) -> list[tuple[int, bytes]]:
    return [line for chunk in line_chunks(piece) for line in chunk.lines]


def test_lines_keep_their_numbers_and_everything_but_their_end(tmp_path: Path):
    data = b"one\n\n \t\r\ntw\xe2\x80\xa8o\r\n\x85\x0b\x0c\nlast"
    piece = _piece(tmp_path / "a.jsonl", data)
    assert _lines(piece) == [(1, b"one"), (4, b"tw\xe2\x80\xa8o\r"), (5, b"\x85\x0b\x0c"), (6, b"last")]
    assert [chunk.last_line for chunk in line_chunks(piece)] == [6]
    assert [chunk.lines for chunk in line_chunks(_piece(tmp_path / "b.jsonl", b""))] == [[]]


@pytest.mark.parametrize("seed", range(4))
def test_chunks_depend_on_the_lines_alone(tmp_path: Path, seed: int):
    random_ = random.Random(seed)
    data = b"".join(b"z" * random_.randrange(20_000) + b"\n" for _ in range(1_500))
    plain, packed = _piece(tmp_path / "a.jsonl", data), _piece(tmp_path / "a.jsonl.gz", gzip.compress(data, 1))
    squeezed = _piece(tmp_path / "a.jsonl.zst", pa.compress(data, codec="zstd", asbytes=True))
    inside = _piece(tmp_path / "b.jsonl", b"before\n" + data + b"after\n", 7, 7 + len(data))
    chunks = [[chunk.lines for chunk in line_chunks(piece)] for piece in (plain, packed, squeezed, inside)]
    assert chunks[0] == chunks[1] == chunks[2] == chunks[3] and len(chunks[0]) > 2
    assert all(sum(len(line) for _, line in chunk) >= CHUNK_BYTES for chunk in chunks[0][:-1])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_progress_adds_up_to_the_stored_bytes(tmp_path: Path, name: str):
    data = b"".join(os.urandom(300).hex().encode() + b"\n" for _ in range(20_000))
    packed = {".gz": gzip.compress(data, 1), ".zst": pa.compress(data, codec="zstd", asbytes=True)}
    piece = _piece(tmp_path / name, packed.get(Path(name).suffix, data))
    read = [chunk.read_bytes for chunk in line_chunks(piece)]
    assert sum(read) == piece.stop and len(read) > 2 and min(read) >= 0


def test_several_members_and_frames_are_read_to_the_end(tmp_path: Path):
    assert _lines(_piece(tmp_path / "a.jsonl.gz", gzip.compress(b"a\nb") + gzip.compress(b"c\n"))) == [
        (1, b"a"),
        (2, b"bc"),
    ]
    frames = pa.compress(b"a\nb", codec="zstd", asbytes=True) + pa.compress(b"c\n", codec="zstd", asbytes=True)
    assert _lines(_piece(tmp_path / "a.jsonl.zst", frames)) == [(1, b"a"), (2, b"bc")]


@pytest.mark.parametrize("harm", ["cut", "garbage", "not at all", "inside"])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_broken_compressed_data_are_an_error_that_names_the_file(tmp_path: Path, suffix: str, harm: str):
    data = b"".join(b"%d %s\n" % (i, os.urandom(9).hex().encode()) for i in range(30_000))
    packed = gzip.compress(data) if suffix == ".gz" else pa.compress(data, codec="zstd", asbytes=True)
    middle = len(packed) // 2
    harmed = {
        "cut": packed[:-3],
        "garbage": packed + b"garbage",
        "not at all": b"plain text\n",
        "inside": packed[:middle] + bytes(64) + packed[middle + 64 :],
    }[harm]
    with pytest.raises(StorageError, match=rf"a\.jsonl\{suffix}: its \w+ data break off or are damaged after line "):
        _lines(_piece(tmp_path / f"a.jsonl{suffix}", harmed))


def test_a_file_changed_since_it_was_listed_is_refused(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"a\nb\n")
    piece = LocalPiece(path=str(path), key="a.jsonl", start=0, stop=4, version=version_of(path))
    assert len(_lines(piece)) == 2
    path.write_bytes(b"x\ny\n")
    with pytest.raises(StorageError, match=r"a\.jsonl was changed after it was listed"):
        _lines(piece)


def test_a_file_changed_while_it_is_read_is_refused(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes((b"a" * 1000 + b"\n") * 10_000)
    piece = LocalPiece(path=str(path), key="a.jsonl", start=0, stop=path.stat().st_size, version=version_of(path))
    chunks = line_chunks(piece)
    assert len(next(chunks).lines) > 1000
    with path.open("r+b") as stream:
        stream.write(b"b")
    with pytest.raises(StorageError, match="was changed after it was listed"):
        list(chunks)
