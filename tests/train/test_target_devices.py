"""A rank's target lies on the rank's devices, and what is lent of it on the rank's own."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from draftmill.train.data import open_input, read_data  # noqa: E402
from draftmill.train.ranks import alone  # noqa: E402
from draftmill.train.roles import Job, Loan, open_target  # noqa: E402
from draftmill.train.start import initial_drafter  # noqa: E402
from small_run import small_settings, write_small_run  # noqa: E402

pytestmark = pytest.mark.torch

CPU, META = torch.device("cpu"), torch.device("meta")


def job(folder: Path, *devices: torch.device) -> Job:
    """A rank's job on devices of its own."""
    settings = small_settings(write_small_run(folder), folder / "out")
    return Job(
        settings, read_data(settings, open_input(settings), folder / "target"), folder / "target", alone(*devices)
    )


def test_the_target_of_a_rank_is_spread_over_all_of_its_devices(tmp_path: Path) -> None:
    target = open_target(job(tmp_path, CPU, META))
    assert [next(layer.parameters()).device for layer in target.layers] == [CPU, CPU, META, META]
    assert (target.device, target.head.weight.device) == (CPU, META)


def test_what_a_rank_borrows_of_its_own_target_is_not_copied(tmp_path: Path) -> None:
    mine = job(tmp_path, CPU)
    target = open_target(mine)
    loan = Loan(target, initial_drafter(target, mine.settings, mine.data.mask_id)).on(mine.ranks.device)
    assert loan.ends.embed is target.embed and loan.ends.head is target.head
