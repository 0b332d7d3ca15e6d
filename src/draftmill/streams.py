"""The standard streams of a process, made such that a run goes on whether or not anybody listens.

Without it a closed stderr (`2>&-`) is None to Python, and a reader that has left (`2> >(head -1)`), a log on a full
disk or a terminal that is gone makes every line of progress an error.
"""

import io
import logging
import os
import sys
from contextlib import suppress
from typing import Any

_STDERR = 2


def secure_streams() -> None:
    """Opens the streams that are closed on nothing, and has stderr drop what cannot be written.

    What runs in place of the process's own streams (a test's capture) is left alone.
    """
    # Closed, their numbers would go to the next files opened, and libraries and children would write into those.
    while (spare := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(spare, True)
    os.close(spare)
    if sys.stderr is sys.__stderr__:
        encoding = sys.__stderr__.encoding if sys.__stderr__ else None
        heard = io.BufferedWriter(_Unheard(_STDERR, "wb", closefd=False))
        sys.stderr = io.TextIOWrapper(heard, encoding, errors="backslashreplace", line_buffering=True)


def show_log() -> None:
    """Has stderr, as it is now, tell what is logged, from INFO on."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)


class _Unheard(io.FileIO):
    """Takes every byte, written or not."""

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        with suppress(OSError):
            return super().write(data) or size
        return size
