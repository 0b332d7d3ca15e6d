"""Work behind the loop's back: one job at a time on a thread of its own, its failure raised at the next occasion."""

import threading
from collections.abc import Callable

from draftmill.contracts.errors import DraftmillError


class Behind:
    """At most one job under way. A process that ends does not wait for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: DraftmillError | None = None
        self._is_done = True

    def do(self, job: Callable[[], None]) -> None:
        """Starts a job, once the one before is done; raises what that one has raised."""
        self.settle()
        self._is_done = False
        self._thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises what a job has raised, without waiting for one."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def settle(self) -> None:
        """Waits for the job under way; raises what it has raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
        assert self._is_done, "the job has met a fault of ours, whose traceback stands above"

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except DraftmillError as error:
            self._failure = error
        self._is_done = True
