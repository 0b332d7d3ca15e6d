"""Progress for people, on stderr: done, total, rate and time left.

On a terminal one line is rewritten; elsewhere plain lines appear at most every 10 s.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

PLAIN_EVERY_S = 10.0
TERMINAL_EVERY_S = 0.2


@dataclass
class Progress:
    """Counts `unit`s of one task. `note` is free text shown at the end of the line."""

    task: str
    total: float
    unit: str
    done: float = 0
    clock: Callable[[], float] = time.monotonic
    _first: float = field(default=0, init=False)
    _start: float = field(default=0.0, init=False)
    _shown: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._first = self.done
        self._start = self._shown = self.clock()

    def advance(self, count: float, note: str | Callable[[], str] = "") -> None:
        """Adds `count` done units, and shows the line when it is due or the task is complete."""
        self.done += count
        now = self.clock()
        every = TERMINAL_EVERY_S if sys.stderr.isatty() else PLAIN_EVERY_S
        if now - self._shown >= every or (count and self.done >= self.total):
            self._shown = now
            self._show(now, note if isinstance(note, str) else note())

    def _show(self, now: float, note: str) -> None:
        line = f"{self.task}: {self.line(now)}{'  ' + note if note else ''}"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[2K{line}" + ("\n" if self.done >= self.total else ""))
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def line(self, now: float) -> str:
        """`done/total unit, rate, time left`, at clock time `now`."""
        rate = self._rate(now)
        left = f"{duration(max(self.total - self.done, 0) / rate)} left" if rate > 0 else "time left unknown"
        return f"{_amount(self.done)}/{_amount(self.total)} {self.unit}  {rate:,.1f} {self.unit}/s  {left}"

    def left_s(self) -> float | None:
        """Seconds left at the rate so far; None where nothing is done yet."""
        rate = self._rate(self.clock())
        return max(self.total - self.done, 0) / rate if rate > 0 else None

    def _rate(self, now: float) -> float:
        return (self.done - self._first) / max(now - self._start, 1e-9)


def _amount(count: float) -> str:
    return f"{count:,}" if isinstance(count, int) else f"{count:,.1f}"


def duration(seconds: float) -> str:
    """Seconds as people read them: `42 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
