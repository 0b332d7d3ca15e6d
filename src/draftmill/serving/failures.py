"""What can go wrong with one request: what is tried again, and what the run is told when it stays wrong.

Tried again: 408, 409, 425, 429, 5xx, timeouts, connections refused, cut or reset, and bodies that hold no answer. Never
another 4xx: it would be refused for ever (vllm-project/speculators#716).
"""

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from draftmill.contracts.errors import ServingError
from draftmill.serving.dialects import readable

LONGEST_RETRY_AFTER_S = 600.0
"""A server that asks for more is asked again after this: it may be up long before."""
_RETRIED_4XX = (408, 409, 425, 429)
_OF_THE_ENDPOINT = (401, 403, 404, 405)


class RequestRefusedError(ServingError):
    """A 4xx that is not tried again: this row failed. `status` is None where the request was never sent."""

    def __init__(self, status: int | None, message: str) -> None:
        super().__init__(f"refused with HTTP {status}: {message}" if status else message)
        self.status = status

    @property
    def is_of_the_endpoint(self) -> bool:
        """Whether any request would be refused so: a missing key, model or path."""
        return self.status in _OF_THE_ENDPOINT


class AttemptsExhaustedError(ServingError):
    """One request failed as often as it may: this row failed. `reasons` counts its failures by class."""

    def __init__(self, reasons: Mapping[str, int], last: str) -> None:
        told = ", ".join(f"{kind} {count} x" for kind, count in reasons.items())
        super().__init__(f"given up after {sum(reasons.values())} attempts ({told}); the last: {last}")
        self.reasons = dict(reasons)


class FleetDownError(ServingError):
    """Every endpoint failed so often in a row that the run stops; what is done is saved, and a rerun goes on."""


class Setback(Exception):
    """One attempt failed in a way that is tried again: no error of the run. `kind` is its class."""

    def __init__(self, kind: str, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.retry_after_s = retry_after_s


TIMEOUT, CONNECT, CONNECTION, BAD_BODY, ABORTED = "timeout", "no connection", "connection lost", "bad body", "aborted"


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> Setback | RequestRefusedError:
    """What a status other than 200 means."""
    message = readable(body)
    if status in _RETRIED_4XX or status >= 500:
        return Setback(f"HTTP {status}", message, retry_after_s(headers.get("Retry-After"), time.time()))
    return RequestRefusedError(status, message)


def retry_after_s(value: str | None, now_s: float) -> float | None:
    """Seconds to wait by a Retry-After header, given as seconds or as a date; None where it says neither."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now_s
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S) if math.isfinite(seconds) else None


@dataclass(frozen=True)
class Backoff:
    """Waits that double from `first_s` to `longest_s`, jittered, so that what failed together does not return so."""

    first_s: float
    longest_s: float

    def delay_s(self, num_failures: int) -> float:
        """Seconds to wait after that many failures in a row."""
        # Bounded before it is raised: 2.0**1024 overflows.
        whole = min(self.longest_s, self.first_s * 2.0 ** min(num_failures - 1, 32))
        return whole * random.uniform(0.5, 1.0)
