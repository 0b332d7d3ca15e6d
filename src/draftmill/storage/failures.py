"""What a failed request of an object store means: whether it may pass, and what people should be told."""

import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

from obstore.exceptions import AlreadyExistsError, BaseError, GenericError, NotSupportedError

from draftmill.contracts.errors import StorageError
from draftmill.storage.local import reason

T = TypeVar("T")

_INSIST_S = 20.0
_LONGEST_WAIT_S = 2.0

# 408, 425 and 429 ask for another try, and so do these codes of S3 under a 4xx status: the request was cut on its way.
_REFUSED = re.compile(r"status code: 4(?!08|25|29)\d\d", re.IGNORECASE)
_CUT_ON_ITS_WAY = re.compile(r"RequestTimeout|IncompleteBody|BadDigest|ContentSHA256Mismatch|OperationAborted|Conflict")


def is_transient(error: Exception) -> bool:
    """Whether the same request may be answered later: no connection, a cut answer, a busy or failing store."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    text = str(error)
    return isinstance(error, GenericError) and (not _REFUSED.search(text) or bool(_CUT_ON_ITS_WAY.search(text)))


def why(error: Exception) -> str:
    """The first line of a store's error, with the cure where it could not be reached or let nobody in."""
    if isinstance(error, OSError):
        return reason(error)
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, BaseError) and ("error sending request" in line.lower() or "403" in line):
        line += "; check AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    return line


def insisting(what: str, request: Callable[[], T]) -> T:
    """What the request gives, asked again for a short while when its answer was cut; else StorageError `what: why`.

    An answer to the question itself is the caller's: FileNotFoundError, AlreadyExistsError, NotSupportedError.
    """
    until, wait_s = time.monotonic() + _INSIST_S, 0.1
    while True:
        try:
            return request()
        except (StorageError, FileNotFoundError, AlreadyExistsError, NotSupportedError):
            raise
        except (BaseError, OSError) as error:
            if not is_transient(error) or time.monotonic() > until:
                raise StorageError(f"{what}: {why(error)}") from error
        time.sleep(random.uniform(0.5, 1.0) * wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
