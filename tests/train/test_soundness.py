"""A sample whose states are not finite is left out, named and bounded; noise is keyed by sample and visit alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from draftmill.chat.chat import open_chat  # noqa: E402
from draftmill.contracts.errors import InputError  # noqa: E402
from draftmill.extract.target import load_target  # noqa: E402
from draftmill.storage.models import locate  # noqa: E402
from draftmill.train.batches import Batches, BatchRule  # noqa: E402
from draftmill.train.data import TrainingData, open_input, read_data  # noqa: E402
from draftmill.train.features import DocumentStates, OwnTarget  # noqa: E402
from draftmill.train.loop import PoisonedError, train  # noqa: E402
from draftmill.train.ranks import alone  # noqa: E402
from draftmill.train.roles import Job, schedule_of  # noqa: E402
from draftmill.train.rows import PlannedRow  # noqa: E402
from draftmill.train.run import run as train_run  # noqa: E402
from draftmill.train.samples import Sample  # noqa: E402
from draftmill.train.soundness import noised, poisoned  # noqa: E402
from draftmill.train.start import initial_drafter  # noqa: E402
from draftmill.train.state import RunState, new_run  # noqa: E402
from sample_sets import write_samples  # noqa: E402
from small_run import small_settings  # noqa: E402
from tiny import write_tiny_target  # noqa: E402

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
POISONED, WIDTH = "s2", 32


class SpoiltStates:
    """States that say which sample they are of; one sample's hold a NaN."""

    def __init__(self, bad: float) -> None:
        self._bad = bad

    def states_of(self, samples: Sequence[Sample]) -> list[DocumentStates]:
        """Normal draws, the same for the same sample."""
        return [self._states(sample) for sample in samples]

    def _states(self, sample: Sample) -> DocumentStates:
        generator = torch.Generator().manual_seed(int(sample.id[1:]))
        features = torch.randn(len(sample.input_ids), WIDTH, generator=generator)
        if sample.id == POISONED:
            features[3, 5] = self._bad
        return DocumentStates(features)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("spoilt")
    write_tiny_target(place / "target", num_layers=4, hidden_size=WIDTH)
    rng = np.random.default_rng(1)
    given = [(f"s{i}", rng.integers(0, 256, 20).tolist(), [t >= 6 for t in range(20)]) for i in range(6)]
    write_samples(place / "samples", given, open_chat(place / "target").tokenizer_hash)
    return place


def trained(folder: Path, bad: float, **changed: object) -> RunState:
    """Four steps over six samples, one of them with a number of its own in its states."""
    chosen = small_settings(folder, folder / "out", rows_per_step=1, num_steps=4, **changed)
    data: TrainingData = read_data(chosen, open_input(chosen), locate(chosen.target))
    target = load_target(folder / "target")
    run = new_run(initial_drafter(target, chosen, data.mask_id), chosen)
    job = Job(chosen, data, folder / "target", alone(CPU))
    schedule = schedule_of(job, OwnTarget(SpoiltStates(bad)), target, run.drafter.shape)
    train(run, schedule, chosen, lambda *_: None)
    return run


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_poisoned_sample_is_left_out_and_named_once(folder: Path, bad: float) -> None:
    run = trained(folder, bad)
    assert run.position.poisoned == (POISONED,)
    assert (run.position.num_bad, run.position.num_updates) == (0, 4)
    assert all(p.isfinite().all() for p in run.drafter.parameters())


def test_more_poisoned_samples_than_may_be_end_the_run(folder: Path) -> None:
    with pytest.raises(PoisonedError, match=rf"states of 1 samples are not finite \(--max-poisoned 0\): {POISONED}"):
        trained(folder, float("nan"), max_poisoned=0)


def test_what_stands_beside_a_poisoned_sample_is_learnt_from_as_if_it_stood_alone(folder: Path) -> None:
    chosen = small_settings(folder, folder / "out")
    data = read_data(chosen, open_input(chosen), locate(chosen.target))
    shape = initial_drafter(load_target(folder / "target"), chosen, data.mask_id).shape
    rule = BatchRule.of(chosen, is_constant=False, num_drafters=1)
    bad, good = (Batches(data.samples, OwnTarget(SpoiltStates(v)), shape, 0, rule) for v in (float("nan"), 1.0))
    row = PlannedRow(0, (1, 2, 3), (20, 20, 20), (3, 3, 3))
    spoilt, sound = bad.batch_at(row), good.batch_at(row)
    assert spoilt.poisoned == (POISONED,) and sound.poisoned == ()
    assert spoilt.supervised_NJ.any(dim=1).tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert spoilt.features_TF.isfinite().all() and spoilt.features_TF[20:40].eq(0).all()
    others = spoilt.layout.documents_T != 1
    assert torch.equal(spoilt.features_TF[others], sound.features_TF[others])


OVERFLOWING_ID = 200


def write_overflowing_run(place: Path, overflowing: Sequence[int]) -> Path:
    """A target whose states are not finite behind one token, and samples of which some begin with it."""
    write_tiny_target(place / "target", num_layers=4, hidden_size=WIDTH)
    weights = place / "target" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.embed_tokens.weight"][OVERFLOWING_ID] = float("inf")
    save_file(tensors, weights, metadata={"format": "pt"})
    rng = np.random.default_rng(2)
    given = [(f"s{i}", rng.integers(0, OVERFLOWING_ID, 30).tolist(), [t >= 6 for t in range(30)]) for i in range(6)]
    for i in overflowing:
        given[i][1][2] = OVERFLOWING_ID
    write_samples(place / "samples", given, open_chat(place / "target").tokenizer_hash)
    return place


def test_first_samples_that_are_poisoned_do_not_keep_a_run_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    chosen = small_settings(write_overflowing_run(tmp_path, (0, 2, 3)), tmp_path / "run", num_steps=3)
    assert train_run(chosen)["content"]["poisoned"] == ["s0", "s2", "s3"]
    assert "hidden states of 3 of the first samples are not finite" in caplog.text


def test_a_target_that_reads_no_sample_well_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    folder = write_overflowing_run(tmp_path, range(6))
    with pytest.raises(InputError, match=r"tap 2 holds numbers that are not finite; load it in a wider dtype"):
        train_run(small_settings(folder, tmp_path / "run", num_steps=3, max_poisoned=9))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_states_of_the_last_layer_count_too() -> None:
    sound, bad = torch.ones(3, 4), torch.ones(3, 4)
    bad[1, 1] = float("nan")
    assert poisoned([DocumentStates(sound, sound), DocumentStates(sound, bad), DocumentStates(bad)]) == [1, 2]


def test_noise_is_of_the_asked_size_and_belongs_to_its_key() -> None:
    states = DocumentStates(3 * torch.randn(400, 50, generator=torch.Generator().manual_seed(0)), torch.ones(400, 5))
    key = ("noise", 0, 2, 1, "s7")
    first, again, other = noised(states, 0.1, *key), noised(states, 0.1, *key), noised(states, 0.1, *key[:-1], "s8")
    assert torch.equal(first.features_TF, again.features_TF)
    assert not torch.equal(first.features_TF, other.features_TF)
    added = first.features_TF - states.features_TF
    assert float(added.std()) == pytest.approx(0.3, rel=0.03) and abs(float(added.mean())) < 0.01
    assert first.last_TH is not None and torch.equal(first.last_TH, torch.ones(400, 5))
