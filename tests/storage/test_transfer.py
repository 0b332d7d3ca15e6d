"""Large objects arrive whole through whatever a network does, or fail by name; a real server behind an unruly proxy."""

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest

from draftmill.contracts.cards import InputFile
from draftmill.contracts.errors import StorageError
from draftmill.storage.patience import Patience
from draftmill.storage.store import Store, open_store, sha256_of
from draftmill.storage.transfer import SHA256_ATTRIBUTE, Span, Transfers, together
from storage.unruly_proxy import GONE, WELL_BEHAVED, Faults, UnrulyProxy

UNRULY = Faults(drop=0.1, lose_answer=0.1, truncate=0.15, refuse=0.1, delay=0.2)


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """Enough for several ranges and several upload parts."""
    path = tmp_path / "big"
    path.write_bytes(os.urandom(35 << 20))
    return path


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def _listed(store: Store, key: str) -> InputFile:
    found = store.stat(key)
    assert found is not None
    return found


async def _there_and_back(store: Store, big: Path, rounds: int) -> list[bool]:
    transfers = Transfers(Patience(120))
    came: list[bool] = []
    for number in range(rounds):
        await transfers.upload(store, f"big-{number}", big, sha256_of(big))
        listed = await transfers.stat(store, f"big-{number}")
        assert listed is not None
        copy = big.with_name(f"copy-{number}")
        await transfers.download(Span(store, listed, 7, listed.size), copy)
        came.append(copy.read_bytes() == big.read_bytes()[7:])
        copy.unlink()
    return came


def test_a_large_object_arrives_whole_through_every_fault(lake: UnrulyProxy, big: Path):
    store = open_store(lake.url)
    lake.faults = UNRULY
    assert _run(_there_and_back(store, big, rounds=3)) == [True] * 3
    assert sum(lake.fates[fate] for fate in ("drop", "lose_answer", "truncate", "refuse")) >= 3, lake.fates
    lake.faults = WELL_BEHAVED
    stored = obstore.get(store.backend, "big-0", options={"head": True})
    assert (stored.meta["size"], stored.attributes[SHA256_ATTRIBUTE]) == (big.stat().st_size, sha256_of(big))


def test_a_range_goes_on_where_it_was_cut(lake: UnrulyProxy, big: Path):
    store = open_store(lake.url)
    store.put("big", big)
    listed, size = _listed(store, "big"), big.stat().st_size
    lake.sent_bytes, lake.faults = 0, Faults(truncate=0.5)
    _run(Transfers(Patience(60)).download(Span(store, listed, 0, size), big.with_name("copy")))
    assert lake.fates["truncate"] and lake.sent_bytes < 1.6 * size
    assert sha256_of(big.with_name("copy")) == sha256_of(big)


def test_an_object_that_is_replaced_is_not_mixed_with_its_successor(lake: UnrulyProxy, tmp_path: Path):
    store = open_store(lake.url)
    store.put("a.jsonl", b"old\n" * 100)
    listed = _listed(store, "a.jsonl")
    for harm in (lambda: store.put("a.jsonl", b"new\n" * 100), lambda: store.delete(["a.jsonl"])):
        harm()
        with pytest.raises(StorageError, match=r"a\.jsonl was changed or removed after it was listed"):
            _run(Transfers(Patience(60)).download(Span(store, listed, 0, 400), tmp_path / "copy"))
        assert not (tmp_path / "copy").exists()


def test_a_store_that_is_gone_for_a_while_is_waited_for(lake: UnrulyProxy):
    store = open_store(lake.url)
    lake.faults = GONE

    async def work() -> None:
        asyncio.get_running_loop().call_later(8, setattr, lake, "faults", WELL_BEHAVED)
        await Transfers(Patience(120)).put(store, "small", b"abc")

    _run(work())
    assert store.get("small") == b"abc"


def test_a_store_that_stays_away_is_given_up_with_what_to_do(lake: UnrulyProxy):
    store = open_store(lake.url)
    lake.faults = GONE
    with pytest.raises(StorageError, match=r"small: given up after 1 attempts, .* run the same command again to go on"):
        _run(Transfers(Patience(0)).put(store, "small", b"abc"))


def test_what_the_store_refuses_is_not_asked_again(lake: UnrulyProxy, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = open_store(lake.url)
    with pytest.raises(StorageError, match=r"403.*check AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID"):
        _run(Transfers(Patience(600)).put(store, "small", b"abc"))
    assert sum(lake.requests.values()) == 1


def test_of_many_writers_one_wins_even_if_its_answer_is_lost(lake: UnrulyProxy):
    store = open_store(lake.url)
    lake.faults = Faults(lose_answer=0.3)
    for name in ("plan-1", "plan-2", "plan-3"):
        with ThreadPoolExecutor(16) as writers:
            seen = list(writers.map(lambda i, name=name: store.put_new(name, b"%d" % i), range(16)))
        assert len(set(seen)) == 1 and store.get(name) == seen[0]
    assert lake.fates["lose_answer"]


FULL = """
import asyncio, resource, signal
from pathlib import Path
from draftmill.storage.patience import Patience
from draftmill.storage.store import open_store
from draftmill.storage.transfer import Span, Transfers
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, 20_000_000))
store = open_store({url!r})
listed = store.stat("big")
asyncio.run(Transfers(Patience(60)).download(Span(store, listed, 0, listed.size), Path({path!r})))
"""


def test_a_full_disk_is_named(lake: UnrulyProxy, big: Path):
    assert resource.RLIMIT_FSIZE  # a limit on the size of files stands for a disk without room
    open_store(lake.url).put("big", big)
    script = FULL.format(url=lake.url, path=str(big.with_name("copy")))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "copy.part cannot be written: File too large; free some space" in done.stderr, done.stderr


def test_the_first_failure_of_several_tasks_is_raised_as_it_is():
    async def fail() -> None:
        raise StorageError("one")

    async def work() -> None:
        async with together() as tasks:
            tasks.create_task(asyncio.sleep(60))
            tasks.create_task(fail())

    with pytest.raises(StorageError, match="one"):
        _run(work())
