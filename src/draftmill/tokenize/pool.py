"""Makes parts in worker processes, or in this one where a single worker is asked for.

A worker that dies is replaced and its part made again; a part that kills its worker twice is an error that names its
inputs. A worker whose memory has grown past its limit makes way for a fresh one after its part.
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Protocol, runtime_checkable

from draftmill.contracts.errors import StorageError
from draftmill.tokenize.crew import DEATH, Nursery, Worker
from draftmill.tokenize.ledger import Made
from draftmill.tokenize.part import OnRead, PartJob, make_part
from draftmill.tokenize.rows import RowMaker, RowMakerSpec
from draftmill.tokenize.worker import BoundedRows

MAX_DEATHS = 2
"""Workers that one part may cost."""


@runtime_checkable
class Pool(Protocol):
    """Makes parts."""

    async def make(self, job: PartJob, on_read: OnRead) -> Made:
        """Has the part's shard written; what is known of it."""
        ...


@asynccontextmanager
async def open_pool(spec: RowMakerSpec, workers: int, limit_bytes: int) -> AsyncIterator[Pool]:
    """A pool of `workers`, each of which may grow by `limit_bytes`; leaving it ends them at once."""
    pool = Here(spec, limit_bytes) if workers == 1 else Workers(spec, workers, limit_bytes)
    try:
        yield pool
    finally:
        await pool.close()


class Here:
    """This process, in a thread beside the transfers, one part after the other."""

    def __init__(self, spec: RowMakerSpec, limit_bytes: int) -> None:
        self._rows = BoundedRows(RowMaker(spec), limit_bytes)
        self._thread = ThreadPoolExecutor(1)
        self._is_closed = False

    async def make(self, job: PartJob, on_read: OnRead) -> Made:
        """Has the part's shard written; what is known of it."""
        loop = asyncio.get_running_loop()

        def told(read: int, rows: int) -> None:
            if self._is_closed:
                raise asyncio.CancelledError
            loop.call_soon_threadsafe(on_read, read, rows)

        return await loop.run_in_executor(self._thread, make_part, self._rows, job, told)

    async def close(self) -> None:
        """Waits for the chunk that is in hand."""
        self._is_closed = True
        await asyncio.to_thread(self._thread.shutdown)


class Workers:
    """Several processes; parts are finished in any order."""

    def __init__(self, spec: RowMakerSpec, workers: int, limit_bytes: int) -> None:
        self._nursery = Nursery(spec, limit_bytes)
        self._limit_bytes = limit_bytes
        self._free: asyncio.Queue[Worker | None] = asyncio.LifoQueue()  # a worker rather than the room for one
        self._alive: set[Worker] = set()
        for _ in range(workers):
            self._free.put_nowait(None)
        self._nursery.warm_up()

    async def make(self, job: PartJob, on_read: OnRead) -> Made:
        """Has the part's shard written; what is known of it."""
        deaths: list[str] = []
        while len(deaths) < MAX_DEATHS:
            worker = await self._take()
            try:
                done = await worker.make(job, on_read)
            except DEATH:
                deaths.append(await worker.how_it_ended())
                await self._drop(worker)
                continue
            except BaseException:
                await self._drop(worker)
                raise
            if done.grown_bytes > self._limit_bytes:
                await self._drop(worker)
            else:
                self._free.put_nowait(worker)
            return done.made
        raise StorageError(
            f"{job.name} has cost {len(deaths)} worker processes ({'; '.join(deaths)}) while they made it of "
            f"{', '.join(piece.key for piece in job.pieces)}. If memory was short, fewer --workers or a smaller "
            "--part-bytes take less of it; what is published stays, and the same command goes on"
        )

    async def _take(self) -> Worker:
        worker = await self._free.get()
        if worker is None:
            try:
                worker = await self._nursery.fork()
            except BaseException:
                self._free.put_nowait(None)
                raise
            self._alive.add(worker)
        return worker

    async def _drop(self, worker: Worker) -> None:
        self._alive.discard(worker)
        worker.end()
        self._free.put_nowait(None)

    def processes(self) -> list[int]:
        """The ids of the workers."""
        return [worker.pid for worker in self._alive]

    async def close(self) -> None:
        """Ends the workers at once; what they were making is lost."""
        for worker in self._alive:
            worker.end()
        await self._nursery.close()
