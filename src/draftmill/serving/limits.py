"""What a run allows its engines: places, attempts, waits. The values come from the room's settings."""

from dataclasses import dataclass, field

from draftmill.serving.failures import Backoff

USUAL_BACKOFF = Backoff(first_s=0.5, longest_s=30.0)


@dataclass(frozen=True, kw_only=True)
class FleetLimits:
    """Bounds of every request and every endpoint."""

    max_in_flight: int
    """Requests at one endpoint at once, at most; how many it really gets adapts to it."""
    max_attempts: int
    """Attempts of one request, the first and those that timed out included, after which its row has failed."""
    max_timeouts: int
    """Timeouts of one request after which its row has failed."""
    max_failures_in_row: int
    """Failures of an endpoint with no answer in between, after which it is given up; what failed together, and was sent
    before the last of them was known, counts once. The run stops when all endpoints are given up."""
    connect_timeout_s: float
    min_timeout_s: float
    """Shortest wait for an answer, however few tokens it may have."""
    min_rate_tok_per_s: float
    """Slowest rate of one answer, assumed until one was seen."""
    api_key: str | None = field(repr=False)
    """Sent as a bearer token; from the environment, never from a recipe, and never shown."""
    backoff: Backoff = USUAL_BACKOFF
    """Waits of a request between attempts, and of an endpoint that was set aside between trials."""
