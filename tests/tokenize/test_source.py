"""What is read is what a card names or a listing shows, compared with what is there; nothing beside it."""

from pathlib import Path

import pytest

from completions import row, write_rows
from draftmill.contracts.cards import PartRecord, Plan, PlannedPart, make_card
from draftmill.contracts.errors import InputError, StorageError
from draftmill.storage.sets import open_set_writer
from draftmill.storage.store import open_store, sha256_of
from draftmill.tokenize.source import open_source
from storage.unruly_proxy import UnrulyProxy


def _generated(url: str, names: list[str]) -> str:
    """A set as generate publishes it, with a set-aside file and a stray one beside its parts."""
    plan = Plan(
        room="generate", recipe={}, inputs=(), parts=tuple(PlannedPart(name=n.split(".")[0], inputs=()) for n in names)
    )
    writer, records = open_set_writer([url], plan), []
    for number, name in enumerate(names):
        data = b'{"id": "%d"}\n' % number
        records.append(
            PartRecord(
                name=name.split(".")[0],
                file=name,
                rows_in=1,
                rows=1,
                tokens=1,
                bytes=len(data),
                sha256=sha256_of(data),
                plan=plan.hash,
            )
        )
        writer.publish(records[-1], data)
    store = open_store(url)
    store.put("part-00000.aside.jsonl.zst", b"aside")
    store.put("stray.jsonl", b"stray")
    writer.finish(make_card("generate", plan, tuple(records), {}, {}))
    return url


NAMES = ["part-00000.jsonl", "part-00001.jsonl.zst"]


def test_of_a_set_its_parts_are_read_and_nothing_else(tmp_path: Path, lake: UnrulyProxy):
    for url in (str(tmp_path / "set"), f"{lake.url}/set"):
        source = open_source(_generated(url, NAMES))
        assert [file.key for file in source.files] == NAMES and source.is_checked
        assert all(file.identity.startswith("sha256:") for file in source.files)


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_set_that_is_not_what_its_card_says_is_refused(tmp_path: Path, harm: str):
    _generated(str(tmp_path), NAMES)
    path = tmp_path / NAMES[1]
    path.unlink() if harm == "gone" else path.write_bytes(b"{}")
    there = 0 if harm == "gone" else 2
    with pytest.raises(StorageError, match=rf"1 of 2 files are missing or cut: {NAMES[1]} \({there} of 12 bytes\)"):
        open_source(str(tmp_path))


def test_a_large_plain_part_of_a_set_is_cut_where_it_can_be_checked_whole(tmp_path: Path, lake: UnrulyProxy):
    here, there = (open_source(_generated(url, ["part-00000.jsonl"])) for url in (str(tmp_path), f"{lake.url}/set"))
    assert len(here.pieces(part_bytes=5)) == 1, "one line"
    assert [piece.name for piece in there.pieces(part_bytes=5)] == ["part-00000.jsonl"]


def test_a_bare_folder_is_what_its_listing_shows(tmp_path: Path, lake: UnrulyProxy):
    keys = ["a b%20.jsonl", "deep/c.jsonl.gz", "z.jsonl.zst"]
    for url in (str(tmp_path / "bare"), f"{lake.url}/bare"):
        store = open_store(url, create=True)
        for key in [*keys, "notes.txt", "a.json"]:
            store.put(key, b"x")
        source = open_source(url)
        assert [file.key for file in source.files] == keys and not source.is_checked
        assert {file.identity.partition(":")[0] for file in source.files} == {"sha256" if "://" not in url else "etag"}
        one = open_source(f"{url}/deep/c.jsonl.gz")
        assert [file.key for file in one.files] == ["c.jsonl.gz"]
        with pytest.raises(InputError, match=r"no \.jsonl"):
            open_source(f"{url}/deep/d.jsonl.gz")


def test_a_copied_folder_is_the_same_input(tmp_path: Path):
    for folder in ("one", "two"):
        write_rows(tmp_path / folder / "a.jsonl", [row(0)])
    assert open_source(str(tmp_path / "one")).files == open_source(str(tmp_path / "two")).files


def test_empty_files_make_no_piece(tmp_path: Path):
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.jsonl.gz").touch()
    write_rows(tmp_path / "c.jsonl", [row(0)])
    assert [piece.name for piece in open_source(str(tmp_path)).pieces(1000)] == ["c.jsonl"]
