"""Work behind the loop's back: one job at a time on a thread of its own, its failure raised at the next occasion."""

from collections.abc import Callable

from draftmill.storage.waiting import Errand, nothing


class Behind:
    """At most one job under way. A process that ends does not wait for it."""

    def __init__(self) -> None:
        self.heed: Callable[[], None] = nothing
        """Called now and then while a job is waited for: raises where the run is to stop."""
        self._errand: Errand[None] | None = None

    def do(self, job: Callable[[], None]) -> None:
        """Starts a job, once the one before is done; raises what that one has raised."""
        self.settle()
        self._errand = Errand(job)

    def check(self) -> None:
        """Raises what a job has raised, without waiting for one."""
        if self._errand is not None and self._errand.is_over:
            self.settle()

    def settle(self) -> None:
        """Waits for the job under way; raises what it has raised."""
        errand, self._errand = self._errand, None
        if errand is not None:
            errand.result(self.heed)
