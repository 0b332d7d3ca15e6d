"""The gate refuses an acceptance length below the promise, and points at one that held-out text cannot give."""

import pytest

from draftmill.contracts.errors import DataGateError
from draftmill.evaluate.gate import check_tau, warn_of_leak


def content(tau: float) -> dict[str, float]:
    return {"tau": tau, "tau_micro": tau, "num_requests": 9, "block_size": 8}


def test_less_than_the_promise_is_refused() -> None:
    check_tau(content(2.5), 2.5)
    with pytest.raises(DataGateError, match=r"2\.400 over 9 .* below 2\.5"):
        check_tau(content(2.4), 2.5)


def test_blocks_accepted_nearly_always_warn_of_a_leak_and_name_the_check(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_leak(content(7.9))
    assert not caplog.records
    warn_of_leak(content(7.93))
    assert "7.93 of 8" in caplog.text and "test_perturbation" in caplog.text
