"""Parts made side by side are closed as if they had been made in order: repeated ids, content and line numbers."""

import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from draftmill.contracts.cards import Dropped, InputFile, PartRecord
from draftmill.tokenize.figures import PartStats, figures_of
from draftmill.tokenize.ledger import Ledger, Made, decode_made, encode_made
from draftmill.tokenize.pieces import Piece


def _made(row_ids: list[int], fingerprints: Sequence[int] = (), dropped: tuple[Dropped, ...] = (), lines=(0,)) -> Made:
    record = PartRecord(
        name="part-00000",
        file="part-00000.arrow",
        rows_in=len(row_ids),
        rows=len(row_ids) - len(dropped),
        tokens=0,
        bytes=0,
        sha256="",
        plan="p",
        stats=msgspec.to_builtins(PartStats(rows=len(row_ids)), str_keys=True),
        dropped=dropped,
    )
    return Made(
        record=record,
        row_ids=np.array(row_ids, np.uint64).tobytes(),
        fingerprints=np.array(fingerprints, np.uint64).tobytes(),
        lines=tuple(lines),
    )


def _piece(key: str) -> Piece:
    return Piece(file=InputFile(key=key, size=9, identity="i"), start=0, stop=9)


@pytest.mark.parametrize("seed", range(20))
def test_repeats_are_those_of_a_plain_count(seed: int):
    random_ = random.Random(seed)
    ledger, seen, seen_prints = Ledger(), set[int](), set[int]()
    for _ in range(12):
        ids = [random_.randrange(0, 60) for _ in range(random_.randrange(0, 20))]
        prints = [random_.randrange(60) for _ in range(random_.randrange(0, 20))]
        made = _made(ids, prints)
        assert ledger.repeated_rows(made) == tuple(i for i, n in enumerate(ids) if n and n in seen)
        repeated = 0
        for number in prints:
            repeated += number in seen_prints
            seen_prints.add(number)
        assert figures_of(ledger.close(made, [_piece("a")])).duplicate_samples == repeated
        seen |= set(ids)


def test_lines_are_counted_on_from_the_part_before():
    ledger = Ledger()
    drop = [Dropped(file=file, line=line, id=None, reason="r") for file, line in (("a", 2), ("b", 1), ("b", 3))]
    ledger.close(_made([1], lines=[5]), [_piece("a")])
    ledger.close(_made([2], lines=[4]), [_piece("a")])
    record = ledger.close(_made([3, 4, 5], dropped=tuple(drop), lines=[3, 7]), [_piece("a"), _piece("b")])
    assert [(d.file, d.line) for d in record.dropped] == [("a", 11), ("b", 1), ("b", 3)]
    record = ledger.close(_made([6], dropped=(drop[1],), lines=[1]), [_piece("b")])
    assert [(d.file, d.line) for d in record.dropped] == [("b", 8)]


def test_what_is_kept_of_a_part_is_read_back_or_passed_over():
    made = _made([1, 2, 0], [7])
    data = encode_made(made)
    assert decode_made(data, "p") == made
    for harmed in (None, b"", b"{}", data[:-1], data + b"x", b"\xff" + data):
        assert decode_made(harmed, "p") is None
    assert decode_made(data, "another plan") is None
