"""Settings of a run refuse numbers that no run can mean, by name, before anything is loaded."""

import pytest
from pydantic import ValidationError

from draftmill.settings.train import TrainSettings


@pytest.mark.parametrize(
    "too_large",
    [
        {"seed": 10**30},
        {"threads": 10**10},
        {"num_layers": 10**9},
        {"block_size": 10**15, "gamma": 4.0},
        {"num_sliding_layers": 1, "sliding_window": 10**20},
        {"num_steps": 10**8},
        {"ranks": 10**9},
        {"rows_per_step": 10**9},
        {"draws_per_pass": 10**9},
    ],
)
def test_a_number_too_large_is_refused_by_name(too_large: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="less than or equal to") as refused:
        TrainSettings(input="in", output=("out",), target="t", **too_large)  # type: ignore[arg-type]
    assert refused.value.errors()[0]["loc"][0] in too_large
