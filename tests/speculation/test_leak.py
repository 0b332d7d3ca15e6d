"""An acceptance length that held-out text cannot give is pointed at."""

import pytest

from draftmill.speculation.leak import warn_of_leak


def test_blocks_accepted_nearly_always_warn_of_a_leak_and_name_the_check(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_leak(7.9, 8)
    assert not caplog.records
    warn_of_leak(7.93, 8)
    assert "7.93 of 8" in caplog.text and "test_perturbation" in caplog.text
