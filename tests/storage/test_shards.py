"""Copies of parts are checked, fetched ahead, and never more than was allowed; local parts stay where they lie."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from draftmill.contracts.errors import StorageError
from draftmill.storage.growing import GrowingSet
from draftmill.storage.patience import Patiently
from draftmill.storage.set_files import card_at, plan_at
from draftmill.storage.shards import Shards
from draftmill.storage.store import open_store
from draftmill.storage.waiting import Waiting, nothing
from sample_sets import GivenSample, Producer, open_samples, write_samples
from storage.far_store import FarStore, sent_away
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
            assert shards.read(parts.part(i).file, Path.read_bytes) == parts.store.get(parts.part(i).file.key)
            shards.fetch_ahead(i + 1)
            shards.settle()
            assert on_disk(cache) <= limit < on_disk(cache) + size_of(parts, i), "what fits stays"
            assert shards.holds(parts.part(i).file), "what was used last is not removed for what comes next"
    copies = next(path.parent for path in cache.rglob("*") if path.is_file())
    (copies / "gone").symlink_to(copies / "nowhere")  # as one that another rank removes between list and look
    tiny = Shards(parts, 1)
    assert tiny.read(parts.part(3).file, Path.is_file) and on_disk(cache) == size_of(parts, 3)


def test_the_next_part_is_fetched_before_it_is_asked_for(lake: UnrulyProxy, cache: Path) -> None:
    producer = Producer(lake.url, SAMPLES, "hash", NUM_PARTS)
    producer.publish(0, 1)
    parts = open_samples(lake.url)
    shards = Shards(parts, 1 << 20)
    shards.read(parts.part(0).file, Path.is_file)
    shards.fetch_ahead(1)
    shards.settle()
    seen = lake.requests.total()
    assert shards.read(parts.part(1).file, Path.is_file) and lake.requests.total() == seen
    shards.fetch_ahead(2)  # is not there yet, which is no failure
    shards.settle()
    assert on_disk(cache) == size_of(parts, 0, 1)


def test_a_changed_object_is_refused_and_not_kept_for_the_next_try(s3_url: str) -> None:
    parts = open_samples(write_samples(s3_url, SAMPLES, "hash", NUM_PARTS))
    store, file = open_store(s3_url), parts.part(2).file
    whole = store.get(file.key)
    store.put(file.key, whole[:-1] + b"x")
    with pytest.raises(StorageError, match="is not what its card says"):
        Shards(parts, 1 << 20).read(file, Path.read_bytes)
    store.put(file.key, whole)
    assert Shards(parts, 1 << 20).read(file, Path.read_bytes) == whole


def test_a_removed_object_is_told(s3_url: str) -> None:
    parts = open_samples(write_samples(s3_url, SAMPLES, "hash", NUM_PARTS))
    open_store(s3_url).delete([parts.part(2).file.key])
    with pytest.raises(StorageError, match=r"part-00002\.arrow cannot be fetched: it is not there"):
        Shards(parts, 1 << 20).read(parts.part(2).file, Path.read_bytes)


def test_local_parts_are_read_where_they_lie(tmp_path: Path, cache: Path) -> None:
    parts = open_samples(write_samples(tmp_path / "set", SAMPLES, "hash", NUM_PARTS))
    shards = Shards(parts, 1)
    assert shards.read(parts.part(1).file, lambda path: path) == tmp_path / "set" / "part-00001.arrow"
    shards.fetch_ahead(2)
    assert not cache.exists()
    (tmp_path / "set" / "part-00004.arrow").unlink()
    with pytest.raises(StorageError, match=r"part-00004\.arrow is missing"):
        shards.read(parts.part(4).file, Path.read_bytes)


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
    assert Shards(parts, 1 << 20).read(file, Path.read_bytes) == (tmp_path / "set" / file.key).read_bytes()
    assert 600 <= clock.now < 640
    line.cut(9999)
    with pytest.raises(StorageError, match=r"s3://far/away: given up after .* 10 min .*error sending request"):
        parts.part(1)


def far_parts(far: FarStore) -> GrowingSet:
    return GrowingSet(far, plan_at(far, "tokenize"), card_at(far), Waiting(0), Patiently(0))


def test_a_copy_that_another_process_removes_before_it_is_opened_is_fetched_again(tmp_path: Path) -> None:
    write_samples(tmp_path / "set", SAMPLES, "hash", NUM_PARTS)
    far = sent_away(tmp_path / "set")
    parts = far_parts(far)
    mine, rival = Shards(parts, 1 << 20), Shards(parts, 1)
    rival.read(parts.part(0).file, Path.read_bytes)
    tried: list[Path] = []

    def open_late(path: Path) -> bytes:
        tried.append(path)
        if len(tried) == 1:
            rival.read(parts.part(1).file, Path.read_bytes)  # for which part 0 makes room
        return path.read_bytes()

    assert mine.read(parts.part(0).file, open_late) == (tmp_path / "set" / "part-00000.arrow").read_bytes()
    assert len(tried) == far.line.asked["part-00000.arrow"] == 2


@dataclass(frozen=True)
class RaidedStore(FarStore):
    """A far store beside a process that removes the first so many copies as soon as they are there."""

    raids: int = 0

    def fetch(self, key: str, path: Path) -> None:
        super().fetch(key, path)
        if self.line.asked[key] <= self.raids:
            path.unlink()


@pytest.mark.parametrize("raids", [1, 99])
def test_a_copy_that_is_gone_before_it_is_checked_is_fetched_again_but_not_for_ever(tmp_path: Path, raids: int) -> None:
    write_samples(tmp_path / "set", SAMPLES, "hash", NUM_PARTS)
    far = sent_away(tmp_path / "set")
    parts = far_parts(RaidedStore(backend=far.backend, line=far.line, raids=raids))
    shards, file = Shards(parts, 1 << 20), parts.part(0).file
    if raids == 1:
        assert shards.read(file, Path.read_bytes) == (tmp_path / "set" / file.key).read_bytes()
        return
    with pytest.raises(StorageError, match=r"part-00000\.arrow was fetched 5 times.*more room than 1,048,576 bytes"):
        shards.read(file, Path.read_bytes)
