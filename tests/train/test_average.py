"""The average follows the weights by its rule, is what a checkpoint publishes, and goes on bit for bit."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load  # noqa: E402

from draftmill.model.checkpoint import load_drafter  # noqa: E402
from draftmill.model.drafter import Drafter  # noqa: E402
from draftmill.model.shape import DrafterShape  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.storage.checkpoints import find_checkpoint, put_checkpoint, step_folder  # noqa: E402
from draftmill.storage.store import open_store  # noqa: E402
from draftmill.train.state import RunState, new_run  # noqa: E402

pytestmark = pytest.mark.torch

SHAPE = DrafterShape(
    **{"hidden_size": 4, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4, "intermediate_size": 4},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_positions": 64, "vocab_size": 10, "block_size": 4},
    **{"tap_ids": (0,), "mask_id": 9, "num_target_layers": 4, "layer_types": ("full_attention",)},
)
DECAY = 0.7  # the rise ends after twenty updates


def started(decay: float | None = DECAY) -> RunState:
    chosen = TrainSettings(input="in", output=("out",), target="t", ema_decay=decay)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return new_run(Drafter(SHAPE), chosen)


def move(run: RunState, updates: range) -> list[torch.Tensor]:
    """Moves the weights by gradients that the number of the update fixes; fc's weights after every update."""
    seen = []
    for update in updates:
        generator = torch.Generator().manual_seed(update)
        for parameter in run.drafter.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        run.move(1e-2)
        seen.append(run.drafter.fc.weight.detach().clone())
    return seen


def test_the_average_is_that_of_a_naive_loop_in_float64() -> None:
    run = started()
    assert torch.equal(run.published.fc.weight, run.drafter.fc.weight)
    mean = run.drafter.fc.weight.detach().double()
    for count, weight in enumerate(move(run, range(30)), 1):
        decay = DECAY if count > 19 else (1 + count) / (10 + count)
        mean = decay * mean + (1 - decay) * weight.double()
    torch.testing.assert_close(run.published.fc.weight.double(), mean, rtol=1e-6, atol=1e-7)
    assert not torch.equal(run.published.fc.weight, run.drafter.fc.weight)


def test_an_average_changes_nothing_that_is_trained_and_takes_no_gradients() -> None:
    plain, averaged = started(None), started()
    for mine, theirs in zip(move(plain, range(5)), move(averaged, range(5)), strict=True):
        assert torch.equal(mine, theirs)
    assert plain.published is plain.drafter
    assert not any(p.requires_grad for p in averaged.published.parameters())


def test_a_checkpoint_publishes_the_average_and_keeps_the_masters_beside_it(tmp_path: Path) -> None:
    run = started()
    move(run, range(5))
    store = open_store(str(tmp_path), create=True)
    put_checkpoint((store,), 5, "plan", run.files())
    found = load_drafter(find_checkpoint(str(tmp_path)))
    assert torch.equal(found.fc.weight, run.published.fc.weight)
    masters = load(store.get(f"{step_folder(5)}/masters.safetensors"))
    assert torch.equal(masters["fc.weight"], run.drafter.fc.weight)
    assert "masters.safetensors" not in started(None).files()


def test_what_only_training_reads_is_not_fetched_from_an_object_store(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path))
    put_checkpoint((open_store(s3_url),), 0, "plan", started().files())
    fetched = {path.name for path in find_checkpoint(s3_url).iterdir()}
    assert fetched == {"config.json", "model.safetensors", "position.json"}


def test_a_run_with_an_average_goes_on_bit_for_bit() -> None:
    whole, cut, again = started(), started(), started()
    move(whole, range(25))
    move(cut, range(15))
    again.restore(cut.files())
    move(again, range(15, 25))
    assert again.files() == whole.files()
