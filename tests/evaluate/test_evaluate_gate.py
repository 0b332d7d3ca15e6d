"""The gate refuses an acceptance length below the promise."""

import pytest

from draftmill.contracts.errors import DataGateError
from draftmill.evaluate.gate import check_tau


def content(tau: float) -> dict[str, float]:
    return {"tau": tau, "tau_micro": tau, "num_requests": 9, "block_size": 8}


def test_less_than_the_promise_is_refused() -> None:
    check_tau(content(2.5), 2.5)
    with pytest.raises(DataGateError, match=r"2\.400 over 9 .* below 2\.5"):
        check_tau(content(2.4), 2.5)
