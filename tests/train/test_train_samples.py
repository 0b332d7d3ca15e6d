"""While one part is read the next one is on its way; a part that is gone by then is told when it is needed."""

import time
from pathlib import Path

import pytest

from draftmill.contracts.errors import StorageError
from draftmill.storage.growing import GrowingSet
from draftmill.storage.patience import Patiently
from draftmill.storage.set_files import card_at, plan_at
from draftmill.storage.waiting import Waiting
from draftmill.train.samples import SampleSet
from sample_sets import GivenSample, write_samples
from storage.far_store import FarStore, sent_away

NUM_PARTS = 4
SAMPLES: list[GivenSample] = [(f"s{i}", [2, 3, 4, i], [True] * 4) for i in range(2 * NUM_PARTS)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def far(tmp_path: Path) -> FarStore:
    """A finished set of two samples a part."""
    write_samples(tmp_path / "set", SAMPLES, "hash", NUM_PARTS)
    return sent_away(tmp_path / "set")


def samples_at(far: FarStore) -> SampleSet:
    parts = GrowingSet(far, plan_at(far, "tokenize"), card_at(far), Waiting(0), Patiently(0))
    return SampleSet(parts, cache_bytes=1 << 20)


def asked_for(far: FarStore, part: int) -> int:
    return far.line.asked[f"part-{part:05d}.arrow"]


def test_the_next_part_is_fetched_while_this_one_is_read(far: FarStore) -> None:
    samples = samples_at(far)
    for part in range(NUM_PARTS):
        assert samples[2 * part].id == f"s{2 * part}"
        for _ in range(1_000):
            if part + 1 == NUM_PARTS or asked_for(far, part + 1):
                break
            time.sleep(0.005)
        else:
            pytest.fail("nobody fetches the next part before it is needed")
    assert [asked_for(far, part) for part in range(NUM_PARTS)] == [1] * NUM_PARTS


def test_a_part_removed_after_it_was_listed_is_told_when_it_is_needed_and_not_before(far: FarStore) -> None:
    samples = samples_at(far)
    far.delete(["part-00002.arrow"])
    assert [samples[i].id for i in range(4)] == ["s0", "s1", "s2", "s3"]
    with pytest.raises(StorageError, match=r"s3://far/away/part-00002\.arrow cannot be fetched: it is not there"):
        samples[4]
    assert samples[6].id == "s6"
