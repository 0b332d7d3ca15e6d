"""Another kind of drafter trains, saves, goes on, exports and decodes through the one trunk, loop and export."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from draftmill.contracts.errors import InputError  # noqa: E402
from draftmill.export.layout import check_layout, write_layout  # noqa: E402
from draftmill.extract.taps import TapReader  # noqa: E402
from draftmill.extract.target import Target, load_target  # noqa: E402
from draftmill.model.checkpoint import drafter_files, load_drafter, save_drafter  # noqa: E402
from draftmill.model.drafter import Drafter  # noqa: E402
from draftmill.model.forms import attention_form  # noqa: E402
from draftmill.model.heads import register  # noqa: E402
from draftmill.model.mask import one_document  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.speculation.decode import Limits, Pair, decode_plainly, decode_speculatively  # noqa: E402
from draftmill.speculation.walk import walk_answer  # noqa: E402
from draftmill.train.anchors import draw_anchors  # noqa: E402
from draftmill.train.batches import Batch, pack  # noqa: E402
from draftmill.train.features import TargetFeatures  # noqa: E402
from draftmill.train.loop import LossOf, Schedule, train  # noqa: E402
from draftmill.train.ranks import alone  # noqa: E402
from draftmill.train.rows import PlannedRow  # noqa: E402
from draftmill.train.samples import Sample  # noqa: E402
from draftmill.train.start import drafter_shape, randomize  # noqa: E402
from draftmill.train.state import RunState, new_run  # noqa: E402
from tiny import write_tiny_target  # noqa: E402
from toy_head import ARCHITECTURE, RANK_KEY, TOY  # noqa: E402

pytestmark = pytest.mark.torch
register(TOY)

PROMPT = (257, *range(40, 51))
LIMITS = Limits(frozenset(), 33, 2048)
STEPS = 60
SETTINGS = TrainSettings(
    **{"input": "i", "output": ("o",), "target": "t", "num_layers": 2, "num_taps": 2, "block_size": 4, "lr": 5e-3},
    **{"loss": "uniform", "optimizer": "muon"},  # type: ignore[arg-type]
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_tiny_target(tmp_path_factory.mktemp("target")))


def toy_drafter(target: Target) -> Drafter:
    shape = replace(
        drafter_shape(target, SETTINGS, mask_id=270), architecture=ARCHITECTURE, head_config=((RANK_KEY, 3),)
    )
    drafter = Drafter(shape)
    randomize(drafter, seed=0)
    return drafter


@pytest.fixture(scope="module")
def go_on(target: Target) -> Callable[[RunState, int], list[float]]:
    """Trains a run on one answer of the target up to some step; gives the losses on the way."""
    answer = decode_plainly(target, PROMPT, LIMITS).token_ids
    ids = np.array([*PROMPT, *answer])
    document = Sample("d", ids, np.arange(len(ids)) >= len(PROMPT))
    reader = TapReader(target, drafter_shape(target, SETTINGS, 270).tap_ids)
    states = TargetFeatures(reader, target.device, max_tokens=100, cache_bytes=0).states_of([document])

    def batch_at(row: PlannedRow) -> Batch:
        drawn = draw_anchors(document.loss_mask, 16, seed=0, epoch=row.epoch, sample_id="d", draw=0)
        return pack([document], [drawn], SETTINGS.block_size).with_states(states, 270)

    def trained(run: RunState, num_steps: int) -> list[float]:
        losses: list[float] = []
        loss_of = LossOf(target, SETTINGS, (), attention_form("auto", run.drafter.shape, target.device))
        schedule = Schedule(
            num_steps, lambda step: [PlannedRow(step, (0,), (40,), (16,))], batch_at, loss_of, alone(target.device)
        )
        train(run, schedule, SETTINGS, lambda sums, epoch, lr, norm: losses.append(sums.loss))
        return losses

    return trained


@pytest.fixture(scope="module")
def trained(target: Target, go_on: Callable[[RunState, int], list[float]]) -> tuple[RunState, list[float]]:
    run = new_run(toy_drafter(target), SETTINGS)
    return run, go_on(run, STEPS)


def test_its_own_parameters_are_trained_with_the_trunks(target: Target, trained: tuple[RunState, list[float]]) -> None:
    run, losses = trained
    assert losses[-1] < 0.2 * losses[0]
    first = toy_drafter(target)
    moved = {
        n: not torch.equal(p, q) for (n, p), q in zip(run.drafter.named_parameters(), first.parameters(), strict=True)
    }
    assert {"head.down.weight", "head.up.weight", "layers.1.scale"} <= moved.keys() and all(moved.values())


def test_it_goes_on_bit_for_bit(target: Target, go_on: Callable[[RunState, int], list[float]]) -> None:
    whole, again = (new_run(toy_drafter(target), SETTINGS) for _ in range(2))
    go_on(whole, 8)
    again.restore(whole.files())
    go_on(again, 10)
    go_on(whole, 10)
    assert again.files() == whole.files()


def test_its_files_name_its_kind_and_give_it_back(trained: tuple[RunState, list[float]], tmp_path: Path) -> None:
    drafter = trained[0].drafter
    save_drafter(tmp_path, drafter)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [ARCHITECTURE]
    assert config[RANK_KEY] == config["dflash_config"][RANK_KEY] == 3
    assert {"before_head.up.weight", "layers.0.scale"} <= load_file(tmp_path / "model.safetensors").keys()
    again = load_drafter(tmp_path)
    assert again.shape == drafter.shape and drafter_files(again) == drafter_files(drafter)


def test_its_export_is_held_to_its_own_list_of_tensors(trained: tuple[RunState, list[float]], tmp_path: Path) -> None:
    drafter = trained[0].drafter
    write_layout(tmp_path, drafter, torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["before_head.down.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"missing or foreign tensors: before_head\.down\.weight"):
        check_layout(tmp_path, drafter, torch.bfloat16)


def test_what_it_drafts_slot_after_slot_is_what_it_was_taught(
    target: Target, trained: tuple[RunState, list[float]]
) -> None:
    pair = Pair.of(target, trained[0].drafter)
    decoded = decode_speculatively(pair, PROMPT, LIMITS)
    assert decoded.token_ids == decode_plainly(target, PROMPT, LIMITS).token_ids
    assert sum(decoded.emitted) / len(decoded.emitted) > 3
    assert walk_answer(pair, PROMPT, decoded.token_ids).emitted == decoded.emitted


def test_training_and_drafting_show_the_head_the_same_tokens(target: Target) -> None:
    drafter = toy_drafter(target)
    for weight in (drafter.get_submodule("head.down").weight, drafter.get_submodule("head.up").weight):
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(1))  # the token before decides much
    pair = Pair.of(target, drafter)
    decoded = decode_speculatively(pair, PROMPT, LIMITS)
    drafts = [draft.token_ids for draft in decoded.drafts]
    assert len(set(drafts)) > len(drafts) / 2
    assert [draft.token_ids for draft in walk_answer(pair, PROMPT, decoded.token_ids).drafts] == drafts
    # Where the drafts are the labels, every slot finds its label most likely, behind the labels before it.
    ids_T = torch.tensor([*PROMPT, *decoded.token_ids])
    anchors_N = len(PROMPT) + torch.tensor([0, *decoded.emitted[:-1]]).cumsum(0)
    features_TF = pair.reader.read(ids_T[None], torch.tensor([len(ids_T)]))[0]
    layout = one_document(anchors_N, len(ids_T), SETTINGS.block_size)
    labels_NJ = torch.tensor(drafts)
    batch = Batch(features_TF, pair.block_ids(ids_T[anchors_N]), layout, labels_NJ, labels_NJ >= 0)
    loss_of = LossOf(target, SETTINGS, (), attention_form("auto", drafter.shape, target.device))
    assert loss_of(drafter, batch).correct_NJ.all()


def test_an_architecture_nobody_registered_is_refused_by_name(target: Target, tmp_path: Path) -> None:
    save_drafter(tmp_path, toy_drafter(target))
    config = (tmp_path / "config.json").read_text().replace(ARCHITECTURE, "SomebodysDraftModel")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(InputError, match=r"SomebodysDraftModel is no drafter .* DFlashDraftModel"):
        load_drafter(tmp_path)
