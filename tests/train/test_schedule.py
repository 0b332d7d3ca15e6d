"""The learning rate is a function of the global step: it rises, holds or falls as its schedule says, and ends low."""

import pytest

from draftmill.settings.train import TrainSettings
from draftmill.train.schedule import lr_at


def rates(num_steps: int = 100, **settings: object) -> list[float]:
    chosen = TrainSettings(input="in", output=("out",), target="t", lr=1.0, **settings)  # type: ignore[arg-type]
    return [lr_at(step, num_steps, chosen) for step in range(num_steps)]


def test_warm_up_rises_by_equal_steps_to_the_peak() -> None:
    assert rates(warmup_frac=0.1)[:10] == pytest.approx([i / 10 for i in range(1, 11)])


def test_cosine_falls_from_the_peak_through_its_half_to_almost_nothing() -> None:
    found = rates(warmup_frac=0.0)
    assert found[0] == 1.0
    assert found[50] == pytest.approx(0.5)
    assert 0 < found[-1] < 0.001
    assert found == sorted(found, reverse=True)


def test_wsd_holds_the_peak_and_falls_over_its_last_share() -> None:
    found = rates(schedule="wsd", warmup_frac=0.1, decay_frac=0.2)
    assert found[9:81] == [1.0] * 72
    assert found[90] == pytest.approx(0.5)
    assert found[99] == pytest.approx(0.05)


def test_the_final_share_is_kept() -> None:
    assert rates(final_lr_frac=0.1)[-1] == pytest.approx(0.1, abs=1e-3)


def test_a_run_of_one_step_moves() -> None:
    assert rates(1) == [1.0]
