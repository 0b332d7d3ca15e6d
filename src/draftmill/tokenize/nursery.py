"""The process that workers are forked from. It loads the tokenizer once, and has neither a thread nor a client.

Every worker, a late one that replaces another too, starts as a copy of it: in a millisecond, with the tokenizer's
memory shared, and without the locks and sockets that a copy of the run itself would inherit half-used.
"""

import gc
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from draftmill.contracts.errors import DraftmillError
from draftmill.tokenize.messages import Ended, Failed, Forked, Ready, receive, send
from draftmill.tokenize.rows import RowMaker
from draftmill.tokenize.worker import work

FORK = b"F"
# New containers between two collections: those of some chunks of rows, hardly one of which is part of a cycle.
_COLLECT_EVERY = 100_000


def main(control: socket.socket) -> None:
    """Loads what the run says, then forks a worker for every socket that it is handed, until the run hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the run alone answers
    given = receive(control)
    if given is None:
        return
    spec, limit_bytes = pickle.loads(given)
    try:
        rows = RowMaker(spec)
    except DraftmillError as error:
        send(control, Failed(type(error).__name__, str(error)))
        return
    settle()
    send(control, Ready(num_threads()))
    alive: set[int] = set()
    try:
        _fork_on_request(control, alive, rows, limit_bytes)
    finally:  # the run has hung up, or is gone: what they are making is lost
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # waited for, their CPU time is the run's
            while True:
                os.wait()


def _fork_on_request(control: socket.socket, alive: set[int], rows: RowMaker, limit_bytes: int) -> None:
    for channel in _requests(control, alive):
        pid = os.fork()
        if pid == 0:
            control.close()
            _be_worker(channel, rows, limit_bytes)
        channel.close()
        alive.add(pid)
        send(control, Forked(pid))


def settle() -> None:
    """Leaves all that is loaded to itself: a collection in a worker would write to every page that it shares."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY)


def num_threads() -> int:
    """Threads of this process."""
    return len(list(Path("/proc/self/task").iterdir()))


def _requests(control: socket.socket, alive: set[int]) -> Iterator[socket.socket]:
    """The sockets of workers to be; tells the run of those `alive` that have ended meanwhile."""
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(1024)
        _tell_of_the_dead(control, alive)
        if control in ready:
            asked, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not asked:
                signal.set_wakeup_fd(-1)
                return
            yield socket.socket(fileno=descriptors[0])


def _tell_of_the_dead(control: socket.socket, alive: set[int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        alive.discard(pid)
        send(control, Ended(pid, os.waitstatus_to_exitcode(status)))


def _be_worker(channel: socket.socket, rows: RowMaker, limit_bytes: int) -> NoReturn:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        work(channel, rows, limit_bytes)
        os._exit(0)
    except (BrokenPipeError, ConnectionResetError):  # the run was killed
        os._exit(0)
    finally:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError):  # the run was killed
        main(socket.socket(fileno=int(sys.argv[1])))
