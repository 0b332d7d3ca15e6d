"""Completions sets: written from rows given by a test, read without the code that wrote them, held to their word."""

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zstandard

from draftmill.contracts.cards import PartRecord, Plan, PlannedPart, make_card
from draftmill.contracts.rows import Row, encode_row
from draftmill.storage.sets import open_set_writer
from draftmill.storage.store import sha256_of


def write_completions(folder: Path, rows: list[Row]) -> None:
    """Publishes the rows as a finished set of one part."""
    plan = Plan(room="generate", recipe={}, inputs=(), parts=(PlannedPart(name="part-00000", inputs=()),))
    data = b"".join(encode_row(row) for row in rows)
    record = PartRecord(
        name="part-00000", file="part-00000.jsonl", rows_in=len(rows), rows=len(rows), tokens=1, bytes=len(data),
        sha256=sha256_of(data), plan=plan.hash,
    )  # fmt: skip
    writer = open_set_writer([str(folder)], plan)
    writer.publish(record, data)
    writer.finish(make_card("generate", plan, (record,), {}, {}))


def lines_of(file: Path) -> list[bytes]:
    """The lines of a part file, cut at line ends alone."""
    data = file.read_bytes()
    if file.name.endswith(".gz"):
        data = gzip.decompress(data)
    elif file.name.endswith(".zst"):
        data = zstandard.ZstdDecompressor().decompress(data)
    assert not data or data.endswith(b"\n")
    return data.split(b"\n")[:-1]


def records_of(folder: Path) -> list[dict[str, Any]]:
    """Every part's record, in order."""
    return [json.loads(file.read_bytes()) for file in sorted(folder.glob("part-?????.json"))]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of the set, as its records name them."""
    return [json.loads(line) for record in records_of(folder) for line in lines_of(folder / record["file"])]


def aside_of(folder: Path) -> list[dict[str, Any]]:
    """The rows that were set aside."""
    files = [record["set_aside"]["file"] for record in records_of(folder) if record["set_aside"]]
    return [json.loads(line) for file in files for line in lines_of(folder / file)]


def lost_in(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The rows listed as `dropped` or `failed`."""
    return [row for record in records_of(folder) for row in record[kind]]


def card_of(folder: Path) -> dict[str, Any]:
    """The hashed half of the card."""
    return json.loads((folder / "card.json").read_bytes())["content"]


def check_parts(folder: Path) -> None:
    """Each part equals its record, byte by byte and row by row; no row is in two places."""
    named: set[str] = set()
    for record in records_of(folder):
        data = [(record["file"], record["rows"], record)]
        if aside := record["set_aside"]:
            data.append((aside["file"], aside["rows"], aside))
            reasons = Counter(json.loads(line)["reason"] for line in lines_of(folder / aside["file"]))
            assert reasons == aside["reasons"]
        for name, rows, said in data:
            content = (folder / name).read_bytes()
            assert (len(content), hashlib.sha256(content).hexdigest()) == (said["bytes"], said["sha256"]), name
            assert len(lines_of(folder / name)) == rows, name
            named.add(name)
        num_aside = aside["rows"] if aside else 0
        assert record["rows_in"] == record["rows"] + num_aside + len(record["dropped"]) + len(record["failed"])
    ids = Counter(row["id"] for row in (*rows_of(folder), *aside_of(folder), *lost_in(folder, "failed")))
    assert [row_id for row_id, count in ids.items() if count > 1] == []
    if (folder / "card.json").exists():
        lying = {file.name for file in folder.glob("part-*") if file.suffix != ".json"}
        assert lying == named, "files that no record names"


def check_whole(folder: Path, ids: Iterable[str]) -> None:
    """The set is finished, its parts equal their records, and every id is there exactly once."""
    check_parts(folder)
    card = card_of(folder)
    there = [row["id"] for row in (*rows_of(folder), *aside_of(folder), *lost_in(folder, "failed"))]
    assert sorted(there) == sorted(ids)
    assert card["rows"] == len(rows_of(folder)) and sum(card["set_aside"].values()) == len(aside_of(folder))
    lost = sum(card["dropped"].values()) + sum(card["failed"].values())
    assert card["rows_in"] == card["rows"] + sum(card["set_aside"].values()) + lost
