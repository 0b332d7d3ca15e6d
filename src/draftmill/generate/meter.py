"""Progress of the room, for people: rows, output tokens, what each endpoint does, what was lost, time left."""

import time
from collections import Counter
from collections.abc import Callable

from draftmill.contracts.cards import Dropped
from draftmill.generate.conversation import Kept
from draftmill.progress import Progress
from draftmill.serving.endpoint import EndpointFigures

_TOLD = ("set aside", "dropped", "failed", "read otherwise")


class Meter:
    """Counts prompts as they end. `endpoints` says what the engines have done so far; nothing where there are none."""

    def __init__(self, total: int, endpoints: Callable[[], tuple[EndpointFigures, ...]]) -> None:
        self._progress = Progress("generate", total=total, unit="rows")
        self._endpoints = endpoints
        self._start_s = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._tokens = 0

    def ended(self, end: Kept | Dropped | None) -> None:
        """One prompt more is done; None: it failed."""
        if isinstance(end, Kept):
            self._tokens += end.figures.completion_tokens
        self._counts[_kind(end)] += 1
        self._counts["read otherwise"] += isinstance(end, Kept) and end.figures.prompt_differs > 0
        self._progress.advance(1, self._note)

    def skip(self) -> None:
        """One prompt was done before this run."""
        self._progress.total -= 1

    def tick(self) -> None:
        """Shows the line when it is due, though nothing has ended."""
        self._progress.advance(0, self._note)

    def _note(self) -> str:
        elapsed_s = max(time.monotonic() - self._start_s, 1e-9)
        lost = [f"{self._counts[kind]:,} {kind}" for kind in _TOLD if self._counts[kind]]
        engines = [_shown(figures, elapsed_s) for figures in self._endpoints()]
        return "  ".join([f"{self._tokens / elapsed_s:,.0f} tokens/s", *lost, *engines])


def _kind(end: Kept | Dropped | None) -> str:
    if isinstance(end, Kept):
        return "set aside" if end.reason else "ok"
    return "dropped" if end else "failed"


def _shown(endpoint: EndpointFigures, elapsed_s: float) -> str:
    """`[10.0.0.1:30000 812 tokens/s, 64 of 96 at once, 3 retries]`"""
    host = endpoint.url.partition("://")[2].partition("/")[0]
    retries = sum(endpoint.retries.values())
    told = [
        f"{host} {endpoint.output_tokens / elapsed_s:,.0f} tokens/s",
        f"{endpoint.in_flight} of {endpoint.concurrency} at once" if endpoint.is_up else "down",
        *([f"{retries:,} retries"] if retries else []),
    ]
    return f"[{', '.join(told)}]"
