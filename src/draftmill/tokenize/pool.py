"""Makes parts in worker processes, or in this one where a single worker is asked for.

Workers are spawned (a forked tokenizer or store client can deadlock), open one tokenizer each and keep it for the
whole run. At most as many parts as workers are under way, so that a worker that dies names the parts it can have had.
"""

import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from draftmill.contracts.cards import PartRecord
from draftmill.contracts.errors import StorageError
from draftmill.tokenize.part import Craft, PartJob, PartMaker

Step = Literal["scan", "make"]


class Pool:
    """`workers` part makers. Use as a context manager: leaving it ends the workers, at once where something failed."""

    def __init__(self, craft: Craft, workers: int) -> None:
        self._size = workers
        self._others = set(multiprocessing.active_children())
        self._maker = PartMaker(craft) if workers == 1 else None
        self._executor = None if workers == 1 else _executor(craft, workers)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._executor is None:
            return
        if kind is not None:
            for child in self.processes():
                child.terminate()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def processes(self) -> list[multiprocessing.process.BaseProcess]:
        """The workers that are alive; none where the work is done in this process."""
        return [child for child in multiprocessing.active_children() if child not in self._others]

    def scan(self, jobs: Sequence[PartJob]) -> Iterator[tuple[PartJob, NDArray[np.uint64]]]:
        """The id hashes of each job's rows, in any order."""
        return self._each("scan", jobs)

    def make(self, jobs: Sequence[PartJob]) -> Iterator[tuple[PartJob, PartRecord]]:
        """The record of each part as it is finished, in any order; its shard lies in the spool."""
        return self._each("make", jobs)

    def _each(self, step: Step, jobs: Sequence[PartJob]) -> Iterator[tuple[PartJob, Any]]:
        if self._executor is None:
            for job in jobs:
                yield job, _work(self._maker, step, job)
            return
        waiting = list(reversed(jobs))
        running: dict[Future[Any], PartJob] = {}
        while waiting or running:
            while waiting and len(running) < self._size:
                job = waiting.pop()
                running[_submit(self._executor, step, job, running)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running[future], _result(future, running)
                del running[future]


def _submit(
    executor: ProcessPoolExecutor, step: Step, job: PartJob, running: dict[Future[Any], PartJob]
) -> Future[Any]:
    try:
        return executor.submit(_work_in_worker, step, job)
    except BrokenProcessPool as error:
        raise _worker_died([*running.values(), job]) from error


def _result(future: Future[Any], running: dict[Future[Any], PartJob]) -> Any:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise _worker_died(list(running.values())) from error


def _worker_died(jobs: Sequence[PartJob]) -> StorageError:
    names = " or ".join(f"{job.name} ({', '.join(p.name for p in job.pieces)})" for job in jobs)
    return StorageError(
        f"a worker process died (killed, or out of memory) while it made {names}. What is published stays: "
        "run the same command again to go on; fewer --workers or a smaller --part-bytes take less memory"
    )


def _executor(craft: Craft, workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(craft,))


_worker_maker: PartMaker | None = None


def _start_worker(craft: Craft) -> None:
    global _worker_maker
    # The processes are the parallelism; the tokenizer's own threads would only compete with them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_maker = PartMaker(craft)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _work_in_worker(step: Step, job: PartJob) -> Any:
    return _work(_worker_maker, step, job)


def _work(maker: PartMaker | None, step: Step, job: PartJob) -> Any:
    assert maker is not None
    return maker.scan(job) if step == "scan" else maker.make(job)
