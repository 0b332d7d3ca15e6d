"""A worker: makes the parts it is told to and tells of its progress, until the run hangs up."""

import socket
from collections.abc import Sequence
from pathlib import Path

from draftmill.contracts.errors import DraftmillError
from draftmill.tokenize.messages import Done, Failed, Read, next_job, send
from draftmill.tokenize.part import make_part
from draftmill.tokenize.rows import Line, RowBatch, RowMaker

_PAGE_BYTES = 4096


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE_BYTES


class BoundedRows:
    """A RowMaker that is built anew when memory has grown by `limit_bytes`: a tokenizer's cache has no bound.

    What it makes does not depend on when that happens.
    """

    def __init__(self, rows: RowMaker, limit_bytes: int) -> None:
        self._rows, self._limit_bytes = rows, limit_bytes
        self._before = resident_bytes()

    def make(self, lines: Sequence[Line], file: str, *, careful: bool = False) -> RowBatch:
        """As RowMaker does."""
        if resident_bytes() - self._before > self._limit_bytes:
            self._rows = RowMaker(self._rows.spec)
            self._before = resident_bytes()
        return self._rows.make(lines, file, careful=careful)


def work(channel: socket.socket, rows: RowMaker, limit_bytes: int) -> None:
    """Makes one part after the other."""
    bounded, before = BoundedRows(rows, limit_bytes), resident_bytes()
    while (job := next_job(channel)) is not None:
        try:
            made = make_part(bounded, job, lambda read, rows: send(channel, Read(read, rows)))
        except DraftmillError as error:
            send(channel, Failed(type(error).__name__, str(error)))
            continue
        send(channel, Done(made, resident_bytes() - before))
