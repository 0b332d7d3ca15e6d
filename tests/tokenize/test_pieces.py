"""Parts are planned from sizes alone; a large plain file is cut at line starts, found by small reads at each cut."""

import random

import pytest

from draftmill.contracts.cards import InputFile
from draftmill.contracts.rows import JSONL
from draftmill.tokenize.pieces import Piece, cut_parts, line_starts, pieces_of, shard_bytes


def _file(key: str, size: int) -> InputFile:
    return InputFile(key=key, size=size, identity="etag:1")


class _Content:
    """A file that counts what is read of it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.read_bytes = 0

    def __call__(self, start: int, stop: int) -> bytes:
        self.read_bytes += len(self.data[start:stop])
        return self.data[start:stop]


@pytest.mark.parametrize("seed", range(30))
def test_pieces_hold_every_line_once_and_whole(seed: int):
    random_ = random.Random(seed)
    lines = [b"x" * random_.choice((0, 1, 3, 40, 400)) + b"\n" for _ in range(random_.randrange(1, 60))]
    data = b"".join(lines)[: None if seed % 3 else -1]  # now and then without a last line end
    part_bytes = random_.choice((1, 7, 50, 333, 5000))

    pieces = list(pieces_of(_file("a.jsonl", len(data)), part_bytes, _Content(data)))

    assert b"".join(data[piece.start : piece.stop] for piece in pieces) == data
    assert all(data[piece.start - 1 : piece.start] in (b"", b"\n") for piece in pieces)
    longest = max(map(len, lines)) + round(part_bytes / 1.2) + 1
    assert all(0 < piece.stop - piece.start <= longest for piece in pieces)


def test_a_line_longer_than_parts_is_one_piece_and_read_at_most_once():
    content = _Content(b"a\n" + b"x" * 1_000_000 + b"\nb\n")
    pieces = list(pieces_of(_file("a.jsonl", len(content.data)), 120_000, content))
    assert [(p.start, p.stop) for p in pieces] == [(0, 1_000_003), (1_000_003, 1_000_005)]
    assert content.read_bytes <= len(content.data) + 20


def test_a_cut_costs_one_small_read():
    line = b"y" * 999 + b"\n"
    content = _Content(line * 20_000)
    cuts = range(1_000_500, len(content.data), 1_000_000)
    assert line_starts(cuts, len(content.data), content) == [cut + 500 for cut in cuts]
    assert content.read_bytes <= len(cuts) * (1 << 16)


def test_compressed_and_empty_files_are_never_cut():
    read = _Content(b"")
    assert [p.name for p in pieces_of(_file("a.jsonl.gz", 5000), 10, read)] == ["a.jsonl.gz"]
    assert [p.name for p in pieces_of(_file("a.jsonl.zst", 5000), 10, read)] == ["a.jsonl.zst"]
    assert list(pieces_of(_file("a.jsonl", 0), 10, read)) == []
    assert read.read_bytes == 0


def test_parts_are_filled_in_order_up_to_the_size_of_a_shard():
    sizes = [10, 20, 300, 5, 5, 80, 90]
    pieces = [Piece(file=_file(f"{i}.jsonl", size), start=0, stop=size) for i, size in enumerate(sizes)]
    parts = cut_parts(pieces, part_bytes=shard_bytes(JSONL, 100))
    assert [[p.stop for p in part.pieces] for part in parts] == [[10, 20], [300], [5, 5, 80], [90]]
    assert [part.name for part in parts] == ["part-00000", "part-00001", "part-00002", "part-00003"]
    assert cut_parts([], 100) == ()


def test_a_compressed_file_is_expected_to_fill_more_of_a_shard():
    assert shard_bytes("a.jsonl.zst", 100) > shard_bytes("a.jsonl.gz", 100) > 2 * shard_bytes("a.jsonl", 100)
