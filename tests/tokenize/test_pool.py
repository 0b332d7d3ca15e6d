"""Workers: forked from a process with one thread, replaced when they die or have grown, gone when the run is gone."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from completions import row, write_rows
from draftmill.contracts.errors import InputError, StorageError
from draftmill.tokenize.crew import Nursery
from draftmill.tokenize.ledger import Made
from draftmill.tokenize.lines import LocalPiece
from draftmill.tokenize.part import PartJob
from draftmill.tokenize.pool import Pool, Workers, open_pool
from draftmill.tokenize.rows import RowMaker, RowMakerSpec
from draftmill.tokenize.worker import BoundedRows
from tiny_tokenizer import write_tiny_tokenizer

GROWTH = 1 << 30


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RowMakerSpec:
    return RowMakerSpec(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")), "faithful", 3072)


def _job(folder: Path, number: int = 0, rows: int = 40, path: Path | None = None) -> PartJob:
    source = path or write_rows(folder / f"{number}.jsonl", [row(i % 40, id=f"{number}-{i}") for i in range(rows)])
    size = 1 if path else source.stat().st_size
    piece = LocalPiece(path=str(source), key=source.name, start=0, stop=size, version="")
    name = f"part-{number}"
    return PartJob(name=name, plan="p", pieces=(piece,), shard=str(folder / f"{name}.arrow"))


def _pooled(spec: RowMakerSpec, workers: int, work: Callable[[Pool], Awaitable[None]], growth: int = GROWTH) -> None:
    async def run() -> None:
        async with open_pool(spec, workers, growth) as pool:
            await work(pool)

    asyncio.run(run())


def _ignore(read: int, rows: int) -> None:
    pass


def test_one_worker_is_this_process(tmp_path: Path, spec: RowMakerSpec):
    counted: list[tuple[int, int]] = []

    async def work(pool: Pool) -> None:
        before = psutil.Process().children()
        made = await pool.make(_job(tmp_path), lambda read, rows: counted.append((read, rows)))
        assert multiprocessing.active_children() == [] and psutil.Process().children() == before
        assert made.record.rows == 40

    _pooled(spec, 1, work)
    assert sum(rows for _, rows in counted) == 40
    assert sum(read for read, _ in counted) == (tmp_path / "0.jsonl").stat().st_size


def test_workers_make_what_this_process_makes(tmp_path: Path, spec: RowMakerSpec):
    made: dict[int, list[Made]] = {1: [], 3: []}

    async def work(pool: Pool) -> None:
        folder = tmp_path / type(pool).__name__
        jobs = [pool.make(_job(folder, number), _ignore) for number in range(5)]
        made[3 if isinstance(pool, Workers) else 1] += await asyncio.gather(*jobs)

    for workers in (1, 3):
        _pooled(spec, workers, work)
    assert made[1] == made[3] and [m.record.rows for m in made[1]] == [40] * 5


async def _is_reading(pipe: Path) -> int:
    """Waits until a worker waits for what comes out of the pipe; the pipe's other end."""
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            await asyncio.sleep(0.01)


def test_a_killed_worker_is_replaced_and_its_part_made_again(tmp_path: Path, spec: RowMakerSpec):
    async def work(pool: Pool) -> None:
        assert isinstance(pool, Workers)
        first, rest = (_job(tmp_path, number) for number in range(2))
        pipe, seen = tmp_path / "pipe", [0, 0]
        os.mkfifo(pipe)
        pieces = (first.pieces[0], msgspec.structs.replace(rest.pieces[0], path=str(pipe)))

        def count(read: int, rows: int) -> None:
            seen[0], seen[1] = seen[0] + read, seen[1] + rows

        making = asyncio.create_task(pool.make(msgspec.structs.replace(first, pieces=pieces), count))
        end = await _is_reading(pipe)
        (worker,) = pool.processes()
        Path(rest.pieces[0].path).replace(pipe)
        os.kill(worker, signal.SIGKILL)
        made = await making
        os.close(end)
        assert made.record.rows == 80 and pool.processes() != [worker]
        assert seen == [sum(piece.stop for piece in pieces), 80], "what the dead worker had read is taken back"

    _pooled(spec, 2, work)


def test_a_part_that_kills_two_workers_is_an_error_that_names_its_input(tmp_path: Path, spec: RowMakerSpec):
    async def work(pool: Pool) -> None:
        assert isinstance(pool, Workers)
        pipe = tmp_path / "poison.jsonl"
        os.mkfifo(pipe)
        making = asyncio.create_task(pool.make(_job(tmp_path, path=pipe), _ignore))
        for _ in range(2):
            end = await _is_reading(pipe)
            (worker,) = pool.processes()
            os.kill(worker, signal.SIGKILL)
            os.close(end)
            while _is_running(worker):
                await asyncio.sleep(0.01)
        with pytest.raises(
            StorageError, match=r"part-0 has cost 2 worker processes \(process \d+ ended with signal 9.*poison\.jsonl"
        ):
            await making
        assert (await pool.make(_job(tmp_path, 1), _ignore)).record.rows == 40, "other parts are still made"

    _pooled(spec, 2, work)


def test_a_killed_nursery_is_replaced(tmp_path: Path, spec: RowMakerSpec):
    async def work(pool: Pool) -> None:
        await pool.make(_job(tmp_path, 0), _ignore)
        (nursery,) = (child for child in psutil.Process().children() if "nursery" in " ".join(child.cmdline()))
        nursery.kill()
        nursery.wait(10)
        made = await asyncio.gather(*(pool.make(_job(tmp_path, number), _ignore) for number in (1, 2)))
        assert [m.record.rows for m in made] == [40, 40]

    _pooled(spec, 2, work)


def test_workers_are_forked_from_a_process_with_a_single_thread(spec: RowMakerSpec):
    async def run() -> int:
        nursery = Nursery(spec, GROWTH)
        await nursery.fork()
        (process,) = (child for child in psutil.Process().children() if "nursery" in " ".join(child.cmdline()))
        threads = process.num_threads()
        await nursery.close()
        return threads

    assert asyncio.run(run()) == 1


def test_who_stops_waiting_for_a_worker_leaves_the_nursery_as_it_is(spec: RowMakerSpec):
    """As when a run is stopped: the answer comes, and nobody waits for it any more."""

    async def run() -> None:
        nursery = Nursery(spec, GROWTH)
        first = await nursery.fork()
        (process,) = (child for child in psutil.Process().children() if "nursery" in " ".join(child.cmdline()))
        before = process.children()
        process.suspend()
        stopped = asyncio.create_task(nursery.fork())
        await asyncio.sleep(0.05)
        stopped.cancel()
        await asyncio.wait([stopped])
        process.resume()
        worker = await nursery.fork()
        assert process.is_running(), "another was not needed"
        assert [child.pid for child in before] == [first.pid] != [worker.pid]
        for _ in range(200):  # the worker nobody waited for ends, for nobody has its other end
            if {child.pid for child in process.children()} == {first.pid, worker.pid}:
                break
            await asyncio.sleep(0.01)
        assert {child.pid for child in process.children()} == {first.pid, worker.pid}
        await nursery.close()
        assert not any(map(psutil.pid_exists, (first.pid, worker.pid))), "they end with it, whoever still holds them"

    asyncio.run(run())


def test_how_a_worker_ended_is_still_told_to_the_next_who_asks(spec: RowMakerSpec):
    async def run() -> str:
        nursery = Nursery(spec, GROWTH)
        worker = await nursery.fork()
        asked = asyncio.create_task(worker.how_it_ended())
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        os.kill(worker.pid, signal.SIGKILL)
        told = await worker.how_it_ended()
        await nursery.close()
        return told

    assert asyncio.run(run()).endswith("ended with signal 9")


def test_a_worker_that_has_grown_makes_way(tmp_path: Path, spec: RowMakerSpec):
    pids: list[int] = []

    async def work(pool: Pool) -> None:
        assert isinstance(pool, Workers)
        for number in range(3):
            await pool.make(_job(tmp_path, number), lambda read, rows: pids.extend(pool.processes()))

    _pooled(spec, 2, work, growth=-(1 << 40))
    assert len(set(pids)) == 3
    pids.clear()
    _pooled(spec, 2, work)
    assert len(set(pids)) == 1, "a free worker is taken before a new one is forked"


def test_rows_do_not_depend_on_when_the_tokenizer_is_loaded_anew(spec: RowMakerSpec):
    lines = [(i, msgspec.json.encode(row(i))) for i in range(20)]
    once, often = BoundedRows(RowMaker(spec), GROWTH), BoundedRows(RowMaker(spec), -(1 << 40))
    for _ in range(2):
        assert once.make(lines, "a").input_ids.tolist() == often.make(lines, "a").input_ids.tolist()


def test_a_failure_in_a_worker_is_told_as_it_is(tmp_path: Path, spec: RowMakerSpec):
    async def work(pool: Pool) -> None:
        missing = _job(tmp_path, path=tmp_path / "gone.jsonl")
        with pytest.raises(StorageError, match=r"gone\.jsonl cannot be read"):
            await pool.make(missing, _ignore)

    for workers in (1, 2):
        _pooled(spec, workers, work)


def test_a_tokenizer_that_cannot_be_used_is_told_as_it_is(tmp_path: Path):
    async def work(pool: Pool) -> None:
        await pool.make(_job(tmp_path), _ignore)

    for workers in (1, 2):
        with pytest.raises(InputError, match=r"has no tokenizer\.json"):
            _pooled(RowMakerSpec(tmp_path / "nowhere", "faithful", 3072), workers, work)


KILLED_RUN = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from draftmill.tokenize.crew import Nursery
from draftmill.tokenize.rows import RowMakerSpec

async def run():
    nursery = Nursery(RowMakerSpec(Path({tokenizer!r}), "faithful", 3072), 1 << 30)
    workers = [await nursery.fork() for _ in range(2)]
    print(*[worker.pid for worker in workers], flush=True)
    await asyncio.sleep(600)

asyncio.run(run())
"""


def test_workers_and_nursery_end_when_the_run_is_killed(spec: RowMakerSpec):
    script = KILLED_RUN.format(tests=str(Path(__file__).parents[1]), tokenizer=str(spec.tokenizer))
    killed = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    workers = [int(pid) for pid in killed.stdout.readline().split()]
    others = [child.pid for child in psutil.Process(killed.pid).children(recursive=True)]
    assert len(workers) == 2 and set(workers) < set(others)
    killed.kill()
    killed.wait()
    killed.stdout.close()
    for _ in range(200):
        if not any(map(_is_running, others)):
            break
        time.sleep(0.05)
    assert not any(map(_is_running, others))


def _is_running(pid: int) -> bool:
    """Whether the process lives; one that has ended but was not waited for does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
