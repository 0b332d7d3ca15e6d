"""Makes parts in worker processes, or in this one where a single worker is asked for.

Workers are spawned (a forked tokenizer or store client can deadlock), open one tokenizer each and keep it for the
whole run. At most as many parts as workers are under way, so that a worker that dies names the parts it can have had.
"""

import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftmill.contracts.cards import PartRecord
from draftmill.contracts.errors import StorageError
from draftmill.tokenize.part import Craft, PartJob, PartMaker

Scans = Iterable[tuple[PartJob, NDArray[np.uint64]]]
Records = Iterable[tuple[PartJob, PartRecord]]
OnRows = Callable[[int], None]
"""Called with the number of rows done since its last call."""

_POLL_S = 1.0


@contextmanager
def open_pool(craft: Craft, workers: int) -> Iterator["Here | Workers"]:
    """A pool of `workers`; leaving it ends them, at once where something failed."""
    if workers == 1:
        yield Here(craft)
        return
    pool = Workers(craft, workers)
    try:
        yield pool
    except BaseException:
        pool.terminate()
        raise
    finally:
        pool.close()


class Here:
    """This process, one part after the other."""

    def __init__(self, craft: Craft) -> None:
        self._maker = PartMaker(craft)

    def scan(self, jobs: Sequence[PartJob]) -> Scans:
        """The id hashes of each job's rows."""
        return ((job, self._maker.scan(job)) for job in jobs)

    def make(self, jobs: Sequence[PartJob], on_rows: OnRows) -> Records:
        """The record of each part as it is finished; its shard lies in the spool."""
        return ((job, self._maker.make(job, on_rows)) for job in jobs)


class Workers:
    """Several processes; parts are finished in any order."""

    def __init__(self, craft: Craft, workers: int) -> None:
        self._size = workers
        self._others = set(multiprocessing.active_children())
        context = multiprocessing.get_context("spawn")
        self._rows_done = context.Value("q", 0)
        self._executor = ProcessPoolExecutor(
            workers, context, initializer=_start_worker, initargs=(craft, self._rows_done)
        )

    def processes(self) -> list[multiprocessing.process.BaseProcess]:
        """The workers that are alive."""
        return [child for child in multiprocessing.active_children() if child not in self._others]

    def terminate(self) -> None:
        """Ends the workers at once; what they were making is lost."""
        for child in self.processes():
            child.terminate()

    def close(self) -> None:
        """Waits for the workers to end."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def scan(self, jobs: Sequence[PartJob]) -> Scans:
        """The id hashes of each job's rows."""
        return self._each(_scan_in_worker, jobs, on_rows=lambda rows: None)

    def make(self, jobs: Sequence[PartJob], on_rows: OnRows) -> Records:
        """The record of each part as it is finished; its shard lies in the spool."""
        return self._each(_make_in_worker, jobs, on_rows)

    def _each(self, work: Callable[[PartJob], Any], jobs: Sequence[PartJob], on_rows: OnRows) -> Iterator[Any]:
        waiting = list(reversed(jobs))
        running: dict[Future[Any], PartJob] = {}
        told = self._rows_done.value
        while waiting or running:
            while waiting and len(running) < self._size:
                job = waiting.pop()
                with _naming([*running.values(), job]):
                    running[self._executor.submit(work, job)] = job
            finished = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED).done
            rows_done = self._rows_done.value
            on_rows(rows_done - told)
            told = rows_done
            for future in finished:
                with _naming(list(running.values())):
                    yield running[future], future.result()
                del running[future]


@contextmanager
def _naming(jobs: Sequence[PartJob]) -> Iterator[None]:
    """Turns the death of a worker into an error that names the parts under way."""
    try:
        yield
    except BrokenProcessPool as error:
        names = " or ".join(f"{job.name} ({', '.join(piece.name for piece in job.pieces)})" for job in jobs)
        raise StorageError(
            f"a worker process died (killed, or out of memory) while it made {names}. What is published stays: "
            "run the same command again to go on; fewer --workers or a smaller --part-bytes take less memory"
        ) from error


_worker_maker: PartMaker
_count_rows: OnRows


def _start_worker(craft: Craft, rows_done: "Synchronized[int]") -> None:
    global _worker_maker, _count_rows
    # The processes are the parallelism; the tokenizer's own threads would only compete with them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def count_rows(rows: int) -> None:
        with rows_done.get_lock():
            rows_done.value += rows

    _worker_maker, _count_rows = PartMaker(craft), count_rows


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _scan_in_worker(job: PartJob) -> NDArray[np.uint64]:
    return _worker_maker.scan(job)


def _make_in_worker(job: PartJob) -> PartRecord:
    return _worker_maker.make(job, _count_rows)
