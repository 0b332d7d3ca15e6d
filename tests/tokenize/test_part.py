"""A part is a pure function of its pieces: every row once, in order; all of it made carefully where a row differs."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from completions import row, write_rows
from draftmill.tokenize.figures import figures_of
from draftmill.tokenize.ledger import Made
from draftmill.tokenize.lines import LocalPiece
from draftmill.tokenize.part import DUPLICATE, PartJob, make_part
from draftmill.tokenize.rows import Line, RowBatch, RowMaker, RowMakerSpec
from tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> RowMaker:
    return RowMaker(RowMakerSpec(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")), "faithful", 3072))


class FailsTheCheck:
    """Rows of which the fast engine makes something else, as the check then says."""

    def __init__(self, rows: RowMaker) -> None:
        self.rows = rows
        self.calls: list[bool] = []

    def make(self, lines: Sequence[Line], file: str, *, careful: bool = False) -> RowBatch:
        self.calls.append(careful)
        batch = self.rows.make(lines, file, careful=careful)
        if not careful:
            batch.input_ids[:] = 0
            batch.stats.differing = 1
        return batch


def _job(folder: Path, files: list[list[dict | bytes]], repeats: tuple[int, ...] = ()) -> PartJob:
    paths = [write_rows(folder / f"{i}.jsonl", lines) for i, lines in enumerate(files)]
    pieces = tuple(LocalPiece(path=str(p), key=p.name, start=0, stop=p.stat().st_size, version="") for p in paths)
    return PartJob(name="part-00000", plan="p", pieces=pieces, shard=str(folder / "shard"), repeats=repeats)


def _ignore(read: int, rows: int) -> None:
    pass


def _ids(job: PartJob) -> list[str]:
    return pa.ipc.open_stream(Path(job.shard).read_bytes()).read_all()["id"].to_pylist()


def _drops(made: Made) -> list[tuple[str, int, str | None, str]]:
    return [(drop.file, drop.line, drop.id, drop.reason) for drop in made.record.dropped]


def test_the_first_row_of_an_id_stays_over_the_files_of_a_part(tmp_path: Path, rows: RowMaker):
    job = _job(tmp_path, [[row(0), row(1), row(0)], [b"", row(1), b"{", row(2)]])
    made = make_part(rows, job, _ignore)
    assert _ids(job) == ["row-0", "row-1", "row-2"]
    assert _drops(made) == [
        ("0.jsonl", 3, "row-0", DUPLICATE),
        ("1.jsonl", 2, "row-1", DUPLICATE),
        ("1.jsonl", 3, None, "broken JSON"),
    ]
    assert (made.record.rows_in, made.record.rows, made.lines, len(made.id_hashes)) == (6, 3, (3, 4), 6)
    assert made.id_hashes[0] == made.id_hashes[2] and made.id_hashes[4] == 0
    assert figures_of(made.record).duplicate_rows == 2


def test_rows_that_repeat_earlier_parts_are_left_out_and_their_ids_kept(tmp_path: Path, rows: RowMaker):
    files: list[list[dict | bytes]] = [[row(0), row(1), row(0), row(2)]]
    alone = make_part(rows, _job(tmp_path, files), _ignore)
    job = _job(tmp_path, files, repeats=(0, 2))
    made = make_part(rows, job, _ignore)
    assert _ids(job) == ["row-1", "row-2"] and made.record.file == "part-00000-once.arrow"
    assert [line for _, line, *_ in _drops(made)] == [1, 3]
    assert made.row_ids == alone.row_ids


def test_a_part_with_a_differing_row_is_made_carefully_as_a_whole(
    tmp_path: Path, rows: RowMaker, caplog: pytest.LogCaptureFixture
):
    job = _job(tmp_path, [[row(i) for i in range(9)], [row(9)]])
    true = make_part(rows, job, _ignore)
    doubtful = FailsTheCheck(rows)
    with caplog.at_level(logging.WARNING):
        made = make_part(doubtful, job, _ignore)
    assert doubtful.calls == [False, False, True, True]
    assert (made.record.sha256, made.record.rows) == (true.record.sha256, 10)
    assert (figures_of(made.record).differing, figures_of(true.record).differing) == (2, 0)
    assert "part-00000" in caplog.text and "made again with the reference" in caplog.text
