"""Worker processes as the run sees them, and the nursery that forks them."""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import defaultdict, deque
from contextlib import suppress

from draftmill.contracts.errors import DraftmillError, StorageError
from draftmill.tokenize.messages import (
    Done,
    Ended,
    Failed,
    Forked,
    encode_job,
    framed,
    heard_from_nursery,
    heard_from_worker,
)
from draftmill.tokenize.nursery import FORK
from draftmill.tokenize.part import OnRead, PartJob
from draftmill.tokenize.rows import RowMakerSpec

DEATH = (asyncio.IncompleteReadError, ConnectionError)
"""What talking to a process that has ended raises."""
_MAX_STARTS = 3
_STDERR = 2
_STATUS_WAIT_S = 2.0
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
# The processes are the parallelism, and what is forked has to have a single thread (pyarrow's allocator starts one).
_SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


class Worker:
    """One worker process."""

    def __init__(self, pid: int, streams: _Streams, nursery: "Nursery") -> None:
        self.pid = pid
        self._reader, self._writer = streams
        self._nursery = nursery

    async def make(self, job: PartJob, on_read: OnRead) -> Done:
        """Has it make a part; one of DEATH where it dies, its progress taken back."""
        read, rows = 0, 0
        try:
            self._writer.write(encode_job(job))
            while True:
                message = await heard_from_worker(self._reader)
                if isinstance(message, Done):
                    return message
                if isinstance(message, Failed):
                    raise mendable(message)
                read, rows = read + message.bytes, rows + message.rows
                on_read(message.bytes, message.rows)
        except DEATH:
            on_read(-read, -rows)
            raise

    async def how_it_ended(self) -> str:
        """What ended it, for people."""
        return await self._nursery.how_it_ended(self.pid)

    def end(self) -> None:
        """Ends the process at once."""
        self._writer.close()
        self._nursery.end(self.pid)


def mendable(failure: Failed) -> DraftmillError:
    """The error of another process."""
    kinds = {kind.__name__: kind for kind in DraftmillError.__subclasses__()}
    return kinds[failure.kind](failure.message)


class Nursery:
    """The process that forks workers; started when the first worker is wanted, and again should it die."""

    def __init__(self, spec: RowMakerSpec, limit_bytes: int) -> None:
        self._given = framed(pickle.dumps((spec, limit_bytes)))
        self._one_at_a_time = asyncio.Lock()
        self._line: _Line | None = None
        self._warming: asyncio.Task[None] | None = None

    def warm_up(self) -> None:
        """Starts the nursery, which loads the tokenizer while inputs are fetched."""
        self._warming = asyncio.create_task(self._start())

    async def _start(self) -> None:
        """A failure is met again, and told, by whoever wants a worker."""
        async with self._one_at_a_time:
            with suppress(DraftmillError, *DEATH):
                self._line = self._line or await _call(self._given)

    async def fork(self) -> Worker:
        """A new worker; StorageError where the nursery itself keeps dying."""
        async with self._one_at_a_time:
            for _ in range(_MAX_STARTS):
                try:
                    self._line = self._line or await _call(self._given)
                    return await self._fork(self._line)
                except DEATH:
                    await self.close()
        raise StorageError(
            f"the process that starts workers has ended {_MAX_STARTS} times (killed, or out of memory; see above): "
            "run the same command again to go on, with fewer --workers if memory is short"
        )

    async def _fork(self, line: "_Line") -> Worker:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = await line.fork(theirs)
            return Worker(pid, await asyncio.open_connection(sock=ours), self)
        except BaseException:
            ours.close()
            raise

    async def how_it_ended(self, pid: int) -> str:
        """What ended a worker, as far as the nursery can tell."""
        try:
            async with asyncio.timeout(_STATUS_WAIT_S if self._line else 0):
                status = await (asyncio.shield(self._line.ended[pid]) if self._line else asyncio.Event().wait())
        except TimeoutError:
            return f"process {pid} is gone"
        return f"process {pid} ended with {f'signal {-status}' if status < 0 else f'exit code {status}'}"

    def end(self, pid: int) -> None:
        """Ends a worker, unless it is known to have ended: its number may be another process's by now."""
        if self._line is not None and not self._line.ended[pid].done():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def close(self) -> None:
        """Lets the nursery end."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait([self._warming])
        line, self._line = self._line, None
        if line is not None:
            await line.close()


class _Line:
    """The line to a nursery that has loaded its tokenizer."""

    def __init__(self, process: "subprocess.Popen[bytes]", control: socket.socket, streams: _Streams) -> None:
        self.ended: dict[int, asyncio.Future[int]] = defaultdict(asyncio.get_running_loop().create_future)
        self._process, self._control, self._streams = process, control, streams
        self._asked: deque[asyncio.Future[int]] = deque()  # answered in turn
        self._listener = asyncio.create_task(self._listen(streams[0]))

    async def fork(self, channel: socket.socket) -> int:
        """The id of a new worker that serves the other end of `channel`; one of DEATH where there is no nursery."""
        if self._listener.done():
            raise ConnectionResetError
        forked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        socket.send_fds(self._control, [FORK], [channel.fileno()])
        self._asked.append(forked)
        return await forked

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with suppress(*DEATH):
            while True:
                message = await heard_from_nursery(reader)
                if isinstance(message, Forked):
                    self.ended.pop(message.pid, None)  # the number may have been an earlier worker's
                    if not (forked := self._asked.popleft()).done():  # whoever asked may have been cancelled
                        forked.set_result(message.pid)
                elif isinstance(message, Ended):
                    self.ended[message.pid].set_result(message.status)
        for forked in self._asked:
            if not forked.done():
                forked.set_exception(ConnectionResetError())

    async def close(self) -> None:
        """Hangs up, and waits for the nursery to end."""
        self._listener.cancel()
        self._streams[1].close()
        self._control.close()
        await asyncio.to_thread(self._process.wait)


async def _call(given: bytes) -> _Line:
    """Starts a nursery and waits until it has loaded what is given; DraftmillError where that cannot be used."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "draftmill.tokenize.nursery", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,  # stdout is the card's
            env={**os.environ, **_SINGLE_THREADED, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    try:
        ours.sendall(given)
        streams = await asyncio.open_connection(sock=ours.dup())
        first = await heard_from_nursery(streams[0])
        if isinstance(first, Failed):
            raise mendable(first)
    except BaseException:
        ours.close()
        process.kill()
        await asyncio.to_thread(process.wait)
        raise
    return _Line(process, ours, streams)
