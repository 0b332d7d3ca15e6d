"""The room reads from and writes to an object store as it does to a disk, two outputs at once, on any network."""

from pathlib import Path
from typing import Any

import pytest

import completions
from completions import row, write_rows
from draftmill.contracts.errors import StorageError
from draftmill.settings.inspect import InspectSettings
from draftmill.settings.tokenize import TokenizeSettings
from draftmill.storage.store import open_store
from draftmill.tokenize.inspect import run as inspect
from draftmill.tokenize.run import run
from storage.unruly_proxy import WELL_BEHAVED, Faults, UnrulyProxy
from tiny_tokenizer import write_tiny_tokenizer

ODD = ("a b.jsonl", "a%20b.jsonl", "ü.jsonl", "deep/日本 1+1.jsonl")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    write_tiny_tokenizer(tmp_path / "tokenizer")
    return tmp_path


def _settings(place: Path, **changes: Any) -> TokenizeSettings:
    """The gate lets rows of these tests pass: they are few and much alike."""
    return completions.settings(place, place, place / "tokenizer", max_spike_frac=1, max_duplicate_frac=1, **changes)


def _parts(url: str) -> dict[str, bytes]:
    store = open_store(url)
    return {file.key: store.get(file.key) for file in store.files() if file.key.startswith("part-")}


def test_two_outputs_are_both_complete_and_equal_and_a_set_is_read_back(place: Path, lake: UnrulyProxy):
    source = write_rows(place / "a.jsonl", [row(i) for i in range(9)])
    open_store(f"{lake.url}/in").put("a.jsonl", source)
    outputs = (str(place / "samples"), f"{lake.url}/samples")
    chosen = _settings(place, input=f"{lake.url}/in", output=outputs, part_bytes=400, workers=2)

    card = run(chosen)

    here, there = open_store(outputs[0]), open_store(outputs[1])
    names = [file.key for file in here.files()]
    assert names == [file.key for file in there.files()]
    assert {"plan.json", "card.json", "state.json", "dataset_info.json", "part-00000.arrow"} <= set(names)
    assert [here.get(name) for name in names] == [there.get(name) for name in names]
    assert run(chosen) == card
    assert inspect(InspectSettings(input=outputs[1]))["tokens"] == card["content"]["tokens"]

    # Lost from one of the two: made again, for that one.
    there.delete(["part-00001.json", "card.json"])
    assert run(chosen)["content_hash"] == card["content_hash"]
    assert here.get("part-00001.json") == there.get("part-00001.json")
    assert here.get("card.json") == there.get("card.json")


def test_odd_keys_and_an_unruly_network_change_nothing(place: Path, lake: UnrulyProxy):
    sources = [write_rows(place / "in" / key, [row(i, id=f"{key} {i}") for i in range(6)]) for key in ODD]
    for key, source in zip(ODD, sources, strict=True):
        open_store(f"{lake.url}/in").put(key, source)
    plain = run(_settings(place, input=str(place / "in"), output=(str(place / "plain"),)))
    lake.faults = Faults(drop=0.1, lose_answer=0.1, truncate=0.1, refuse=0.1, delay=0.3)

    card = run(_settings(place, input=f"{lake.url}/in", output=(f"{lake.url}/out",), part_bytes=500, workers=2))

    lake.faults = WELL_BEHAVED
    assert card["content"]["rows"] == 24 == plain["content"]["rows"]
    assert card["content"]["tokens"] == plain["content"]["tokens"]
    assert [part["file"] for part in card["content"]["parts"]] == [
        key for key in _parts(f"{lake.url}/out") if key.endswith(".arrow")
    ]


def test_a_large_plain_object_is_read_by_ranges_and_once(place: Path, lake: UnrulyProxy):
    source = write_rows(place / "a.jsonl", [row(i % 40, id=str(i)) for i in range(6_000)])
    open_store(f"{lake.url}/in").put("a.jsonl", source)
    lake.sent_bytes = 0
    size = source.stat().st_size

    there = run(_settings(place, input=f"{lake.url}/in", output=(str(place / "s3"),), part_bytes=size // 4))

    assert len(there["content"]["parts"]) == 5 and there["content"]["rows"] == 6_000
    assert lake.sent_bytes < 1.2 * size, "each byte comes once, and little around the cuts"
    run(_settings(place, input=str(source), output=(str(place / "local"),), part_bytes=size // 4))
    arrows = [{k: v for k, v in _parts(str(place / n)).items() if k.endswith(".arrow")} for n in ("s3", "local")]
    assert arrows[0] == arrows[1]


def test_a_killed_run_s_downloads_are_not_fetched_again(place: Path, lake: UnrulyProxy):
    for number in range(4):
        rows = write_rows(place / f"{number}.jsonl", [row(i, id=f"{number}-{i}") for i in range(20)])
        open_store(f"{lake.url}/in").put(f"{number}.jsonl", rows)
    broken = {"input": f"{lake.url}/in", "output": (f"{lake.url}/out",), "part_bytes": 700_000}
    # Fails when its one part is made, all inputs fetched by then.
    open_store(f"{lake.url}/in").put("2.jsonl.gz", b"no gzip" * 100)
    with pytest.raises(StorageError, match=r"2\.jsonl\.gz: its gzip data break off"):
        run(_settings(place, **broken))
    with pytest.raises(StorageError, match=r"2\.jsonl\.gz"):
        run(_settings(place, **broken))
    gets = {path.rpartition("/")[2]: n for (method, path), n in lake.requests.items() if method == "GET"}
    assert {name: n for name, n in gets.items() if name.endswith((".jsonl", ".gz"))} == dict.fromkeys(
        ("0.jsonl", "1.jsonl", "2.jsonl", "2.jsonl.gz", "3.jsonl"), 1
    )


def test_an_input_that_changes_after_the_plan_is_refused_by_name(place: Path, lake: UnrulyProxy):
    from draftmill.tokenize.source import open_source

    store = open_store(f"{lake.url}/in")
    store.put("a.jsonl", write_rows(place / "a.jsonl", [row(i) for i in range(9)]))
    source = open_source(f"{lake.url}/in")
    store.put("a.jsonl", write_rows(place / "a.jsonl", [row(i + 1) for i in range(9)]))
    assert source.listed["a.jsonl"] != store.stat("a.jsonl")
