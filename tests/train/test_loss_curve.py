"""Fifty steps of every kind of loss give the recorded curve: a refactor that changes it has changed the numerics.

`python tests/train/test_loss_curve.py` records it anew; the commit that does so says why and shows both.
"""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from draftmill.extract.taps import TapReader  # noqa: E402
from draftmill.extract.target import load_target  # noqa: E402
from draftmill.model.forms import attention_form  # noqa: E402
from draftmill.settings.train import TrainSettings  # noqa: E402
from draftmill.train.anchors import draw_anchors, permutation  # noqa: E402
from draftmill.train.batches import Batch, pack  # noqa: E402
from draftmill.train.features import TargetFeatures  # noqa: E402
from draftmill.train.loop import LossOf, Schedule, train  # noqa: E402
from draftmill.train.ranks import alone  # noqa: E402
from draftmill.train.rows import PlannedRow  # noqa: E402
from draftmill.train.samples import Sample  # noqa: E402
from draftmill.train.start import initial_drafter  # noqa: E402
from draftmill.train.state import new_run  # noqa: E402
from tiny import write_tiny_target  # noqa: E402

pytestmark = pytest.mark.torch

CURVES = Path(__file__).parents[1] / "fixtures" / "loss_curves.json"
MASK_ID, STEPS = 270, 50
KINDS: dict[str, dict[str, object]] = {
    "decay": {"loss": "decay", "init": "target", "schedule": "cosine"},
    "d-pace, sliding": {"loss": "d-pace", "num_sliding_layers": 1, "sliding_window": 9, "schedule": "wsd"},
    "kl and tv": {"loss": "uniform", "hard_weight": 0.1, "kl_weight": 0.5, "tv_weight": 0.9, "labels": "target"},
}


def curve(folder: Path, kind: str) -> list[float]:
    """The losses of fifty steps on eight documents of a tiny target, two to a step."""
    chosen = TrainSettings(
        **{"input": "i", "output": ("o",), "target": "t", "num_layers": 2, "num_taps": 2, "block_size": 8},
        **{"lr": 2e-3, "gamma": 4.0, **KINDS[kind]},  # type: ignore[arg-type]
    )
    target = load_target(write_tiny_target(folder))
    run = new_run(initial_drafter(target, chosen, MASK_ID), chosen)
    shape = run.drafter.shape
    reader = TapReader(target, shape.tap_ids, has_last=chosen.needs_last_state)
    source = TargetFeatures(reader, target.device, max_tokens=200, cache_bytes=0)

    def batch_at(row: PlannedRow) -> Batch:
        docs = [_document(index) for index in row.samples]
        drawn = [draw_anchors(d.loss_mask, 4, seed=0, epoch=row.epoch, sample_id=d.id, draw=0) for d in docs]
        return pack(docs, drawn, shape.block_size).with_states(source.states_of(docs), MASK_ID)

    losses: list[float] = []
    loss_of = LossOf(target, chosen, (), attention_form("auto", shape, target.device))
    rows = [[_row(step // 4, (2 * step % 8, (2 * step + 1) % 8))] for step in range(STEPS)]
    schedule = Schedule(STEPS, lambda step: rows[step], batch_at, loss_of, alone(target.device))
    train(run, schedule, chosen, lambda sums, epoch, lr, norm: losses.append(round(sums.loss, 6)))
    return losses


def _row(epoch: int, pair: tuple[int, int]) -> PlannedRow:
    return PlannedRow(epoch, pair, tuple(map(_length, pair)), (4, 4))


def _length(index: int) -> int:
    return 24 + 3 * index


def _document(index: int) -> Sample:
    length = _length(index)
    ids = permutation(200, "document", index)[:length]
    return Sample(f"d{index}", ids, permutation(length, "mask", index) % 9 > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_curve_is_the_recorded_one(kind: str, tmp_path: Path) -> None:
    recorded = json.loads(CURVES.read_text())[kind]
    # Another processor sums in another order; over fifty steps that grows a little.
    assert curve(tmp_path, kind) == pytest.approx(recorded, rel=2e-4)
    assert recorded[-1] < 0.9 * recorded[0]


if __name__ == "__main__":
    import tempfile

    found = {kind: curve(Path(tempfile.mkdtemp()), kind) for kind in KINDS}
    CURVES.write_text(json.dumps(found, indent=1) + "\n")
