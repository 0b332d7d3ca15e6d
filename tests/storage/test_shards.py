"""Copies of parts are checked, fetched ahead, and never more than was allowed; local parts stay where they lie."""

from pathlib import Path

import pytest

from draftmill.contracts.errors import StorageError
from draftmill.storage.growing import GrowingSet
from draftmill.storage.sets import plan_at
from draftmill.storage.shards import Shards
from draftmill.storage.store import open_store
from draftmill.storage.waiting import Waiting, nothing
from sample_sets import GivenSample, Producer, open_samples, write_samples
from storage.far_store import sent_away
from storage.unruly_proxy import UnrulyProxy

NUM_PARTS = 6
SAMPLES: list[GivenSample] = [(f"s{i:02}", [2, 3, 4, i] * 50, [True] * 200) for i in range(2 * NUM_PARTS)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def size_of(parts: GrowingSet, *indices: int) -> int:
    return sum(parts.part(i).file.size for i in indices)


def on_disk(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())


def test_copies_stay_within_their_bytes_also_those_of_an_earlier_run(s3_url: str, cache: Path) -> None:
    parts = open_samples(write_samples(s3_url, SAMPLES, "hash", NUM_PARTS))
    limit = size_of(parts, 0, 1) + 1
    for _ in range(2):
        shards = Shards(parts, limit)
        for i in range(NUM_PARTS):
            assert shards.path(parts.part(i).file).read_bytes() == parts.store.get(parts.part(i).file.key)
            shards.fetch_ahead(i + 1)
            shards.settle()
            assert on_disk(cache) <= limit < on_disk(cache) + size_of(parts, i), "what fits stays"
            assert shards.holds(parts.part(i).file), "what was used last is not removed for what comes next"
    copies = next(path.parent for path in cache.rglob("*") if path.is_file())
    (copies / "gone").symlink_to(copies / "nowhere")  # as one that another rank removes between list and look
    tiny = Shards(parts, 1)
    assert tiny.path(parts.part(3).file).is_file() and on_disk(cache) == size_of(parts, 3)


def test_the_next_part_is_fetched_before_it_is_asked_for(lake: UnrulyProxy, cache: Path) -> None:
    producer = Producer(lake.url, SAMPLES, "hash", NUM_PARTS)
    producer.publish(0, 1)
    parts = open_samples(lake.url)
    shards = Shards(parts, 1 << 20)
    shards.path(parts.part(0).file)
    shards.fetch_ahead(1)
    shards.settle()
    seen = lake.requests.total()
    assert shards.path(parts.part(1).file).is_file() and lake.requests.total() == seen
    shards.fetch_ahead(2)  # is not there yet, which is no failure
    shards.settle()
    assert on_disk(cache) == size_of(parts, 0, 1)


def test_a_changed_object_is_refused_and_not_kept_for_the_next_try(s3_url: str) -> None:
    parts = open_samples(write_samples(s3_url, SAMPLES, "hash", NUM_PARTS))
    store, file = open_store(s3_url), parts.part(2).file
    whole = store.get(file.key)
    store.put(file.key, whole[:-1] + b"x")
    with pytest.raises(StorageError, match="is not what its card says"):
        Shards(parts, 1 << 20).path(file)
    store.put(file.key, whole)
    assert Shards(parts, 1 << 20).path(file).read_bytes() == whole


def test_a_removed_object_is_told(s3_url: str) -> None:
    parts = open_samples(write_samples(s3_url, SAMPLES, "hash", NUM_PARTS))
    open_store(s3_url).delete([parts.part(2).file.key])
    with pytest.raises(StorageError, match=r"part-00002\.arrow cannot be fetched: it is not there"):
        Shards(parts, 1 << 20).path(parts.part(2).file)


def test_local_parts_are_read_where_they_lie(tmp_path: Path, cache: Path) -> None:
    parts = open_samples(write_samples(tmp_path / "set", SAMPLES, "hash", NUM_PARTS))
    shards = Shards(parts, 1)
    assert shards.path(parts.part(1).file) == tmp_path / "set" / "part-00001.arrow"
    shards.fetch_ahead(2)
    assert not cache.exists()
    (tmp_path / "set" / "part-00004.arrow").unlink()
    with pytest.raises(StorageError, match=r"part-00004\.arrow is missing"):
        shards.path(parts.part(4).file)


def test_a_store_that_is_gone_for_five_minutes_delays_a_part_and_no_more(tmp_path: Path) -> None:
    Producer(tmp_path / "set", SAMPLES, "hash", NUM_PARTS).publish(0, 1)
    far = sent_away(tmp_path / "set")
    clock, line = far.line.clock, far.line
    waiting = Waiting(1200, nothing, clock, clock.sleep)
    parts = GrowingSet(far, plan_at(far, "tokenize"), None, waiting, clock.patiently(600))
    line.cut(300)
    file = parts.part(0).file
    assert 300 <= clock.now < 320
    line.cut(300)
    assert Shards(parts, 1 << 20).path(file).read_bytes() == (tmp_path / "set" / file.key).read_bytes()
    assert 600 <= clock.now < 640
    line.cut(9999)
    with pytest.raises(StorageError, match=r"s3://far/away: given up after .* 10 min .*error sending request"):
        parts.part(1)
