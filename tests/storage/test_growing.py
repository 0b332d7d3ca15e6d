"""A set is read while it is made: parts in the plan's order whenever they come, and its card must agree with them."""

import threading
import time
from pathlib import Path

import pytest

from draftmill.contracts.errors import DataGateError, StorageError
from draftmill.storage.patience import Patiently
from draftmill.storage.waiting import StalledError
from sample_sets import GivenSample, Producer, open_samples
from storage.unruly_proxy import GONE, WELL_BEHAVED, UnrulyProxy

SAMPLES: list[GivenSample] = [(f"s{i}", [2, 3, 4, i], [True] * 4) for i in range(8)]


class Ticks:
    """A clock that goes on by so many seconds whenever it is looked at."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += self._every_s
        return self._now_s


def identities(url: str | Path, limit_s: float = 0) -> list[str]:
    found = open_samples(url, limit_s)
    return [found.part(i).file.identity for i in range(found.num_parts)]


def test_parts_are_the_same_before_and_after_the_card(tmp_path: Path) -> None:
    producer = Producer(tmp_path, SAMPLES, "hash", num_parts=4)
    producer.publish(3, 1)
    growing = open_samples(tmp_path)
    assert not growing.was_finished and growing.num_parts == 4
    assert [growing.find(i) is None for i in range(5)] == [True, False, True, False, True]
    producer.finish()
    growing.complete()
    assert [growing.part(i).file.identity for i in range(4)] == identities(tmp_path)
    assert open_samples(tmp_path).was_finished


def test_a_part_is_waited_for_while_others_come(tmp_path: Path) -> None:
    producer = Producer(tmp_path, SAMPLES, "hash", num_parts=4)
    thread = threading.Thread(target=lambda: (time.sleep(0.3), producer.publish(2, 1, 0), producer.finish()))
    thread.start()
    assert len(identities(tmp_path, limit_s=60)) == 4
    thread.join()


def test_a_maker_that_has_stopped_is_told_with_what_is_there(tmp_path: Path) -> None:
    producer = Producer(tmp_path, SAMPLES, "hash", num_parts=4)
    producer.publish(0, 2)
    with pytest.raises(StalledError, match=r"part-00001 of .* is awaited .*; 2 of 4 parts are there"):
        identities(tmp_path)
    producer.publish(1, 3)
    growing = open_samples(tmp_path)
    with pytest.raises(StalledError, match=r"card\.json of .* is awaited"):
        growing.complete()


def test_a_set_that_its_gate_refuses_is_awaited_no_longer(tmp_path: Path) -> None:
    producer = Producer(tmp_path, SAMPLES, "hash", num_parts=4)
    producer.publish(0)
    growing = open_samples(tmp_path, limit_s=600)
    threading.Timer(0.3, producer.refuse, ["part-00001: too few"]).start()
    growing.waiting.sleep = lambda _: time.sleep(0.01)
    growing.waiting.clock = Ticks(every_s=5)
    refused = "the gate of draftmill tokenize refused it: part-00001: too few"
    with pytest.raises(DataGateError, match=refused):
        growing.part(1)
    with pytest.raises(DataGateError, match=refused):
        open_samples(tmp_path)
    producer.finish()
    assert open_samples(tmp_path).was_finished


def test_a_record_of_another_plan_is_a_leftover(tmp_path: Path) -> None:
    Producer(tmp_path / "other", SAMPLES, "other", num_parts=2).publish(0)
    Producer(tmp_path / "mine", SAMPLES, "hash", num_parts=2)
    for name in ("part-00000.json", "part-00000.arrow"):
        (tmp_path / "mine" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    assert open_samples(tmp_path / "mine").find(0) is None


def test_a_set_that_was_replaced_meanwhile_is_not_read_on(tmp_path: Path) -> None:
    Producer(tmp_path / "a", SAMPLES, "hash", num_parts=2)
    growing = open_samples(tmp_path / "a")
    Producer(tmp_path / "b", SAMPLES, "other", num_parts=2)
    (tmp_path / "a" / "plan.json").write_bytes((tmp_path / "b" / "plan.json").read_bytes())
    with pytest.raises(StorageError, match="that set was replaced"):
        growing.part(0)


def test_a_card_that_names_other_parts_than_were_read_is_refused(tmp_path: Path) -> None:
    Producer(tmp_path, SAMPLES, "hash", num_parts=2).publish(0, 1)
    growing = open_samples(tmp_path)
    growing.part(0)
    Producer(tmp_path, SAMPLES[::-1], "hash", num_parts=2).finish()
    with pytest.raises(StorageError, match=r"names other parts than were read .*part-00000.*made anew"):
        growing.complete()


def test_a_store_that_is_gone_for_a_while_is_waited_for(lake: UnrulyProxy) -> None:
    producer = Producer(lake.url, SAMPLES, "hash", num_parts=2)
    producer.publish(0)
    growing = open_samples(lake.url)
    growing.patiently = Patiently(60)
    lake.faults = GONE
    threading.Timer(2, lambda: setattr(lake, "faults", WELL_BEHAVED)).start()
    assert growing.part(0).rows == 4 and lake.fates["drop"] > 1
