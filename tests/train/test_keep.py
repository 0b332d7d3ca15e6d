"""A rerun goes on from the newest checkpoint that is whole in every store and of the same plan, and prunes the rest."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from draftmill.model.drafter import Drafter  # noqa: E402
from draftmill.model.shape import DrafterShape  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.storage.checkpoints import find_marker, step_folder, steps_on  # noqa: E402
from draftmill.storage.store import open_store  # noqa: E402
from draftmill.train.keep import Checkpoints  # noqa: E402
from draftmill.train.state import RunState, new_run  # noqa: E402

pytestmark = pytest.mark.torch

SETTINGS = TrainSettings(input="in", output=("out",), target="t")
SHAPE = DrafterShape(
    hidden_size=4,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=4,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=64,
    vocab_size=10,
    block_size=4,
    tap_ids=(0,),
    mask_id=9,
    num_target_layers=4,
    layer_types=("full_attention",),
)


def fresh() -> RunState:
    return new_run(Drafter(SHAPE), SETTINGS)


def saved_until(checkpoints: Checkpoints, last_step: int) -> RunState:
    """A run whose weights hold its step, saved whenever that is due."""
    run = fresh()
    for step in range(last_step + 1):
        run.position.step = step
        if checkpoints.is_due(step):
            torch.nn.init.constant_(run.drafter.fc.weight, step)
            checkpoints.save(run)
    return run


def both(tmp_path: Path, plan: str = "plan") -> Checkpoints:
    stores = tuple(open_store(str(tmp_path / name), create=True) for name in ("a", "b"))
    return Checkpoints(stores, plan, num_steps=25, save_every=5, keep=2)


def resumed_step(checkpoints: Checkpoints) -> int | None:
    run = fresh()
    if not checkpoints.resume(run):
        return None
    assert run.drafter.fc.weight.eq(run.position.step).all()
    return run.position.step


def test_the_newest_checkpoint_is_taken_and_the_others_pruned(tmp_path: Path) -> None:
    checkpoints = both(tmp_path)
    assert resumed_step(checkpoints) is None
    saved_until(checkpoints, 17)
    assert steps_on(checkpoints.stores[0]) == [0, 10, 15]
    assert resumed_step(checkpoints) == 15


@pytest.mark.parametrize("file", ["checkpoint.json", "model.safetensors", "optimizer.safetensors"])
def test_what_one_store_lacks_is_not_gone_on_from(tmp_path: Path, file: str) -> None:
    checkpoints = both(tmp_path)
    saved_until(checkpoints, 17)
    (tmp_path / "b" / step_folder(15) / file).write_bytes(b"cut")
    assert resumed_step(checkpoints) == 10
    assert [steps_on(store) for store in checkpoints.stores] == [[0, 10], [0, 10]]


def test_checkpoints_of_another_plan_are_passed_over(tmp_path: Path) -> None:
    saved_until(both(tmp_path), 17)
    assert resumed_step(both(tmp_path, plan="another")) is None


def test_the_last_step_is_saved_even_between_two_that_are_due(tmp_path: Path) -> None:
    checkpoints = Checkpoints(both(tmp_path).stores, "plan", num_steps=13, save_every=5, keep=1)
    saved_until(checkpoints, 13)
    assert [marker.step for marker in checkpoints.markers()] == [0, 13]
    assert find_marker(checkpoints.stores[1], 5) is None
