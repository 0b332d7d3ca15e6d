"""A step's figures are sums and counts: those of a naive loop, whoever made the micro-batches, and one line a step."""

import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
from draftmill.contracts.acceptance import num_accepted  # noqa: E402
from draftmill.contracts.errors import StorageError  # noqa: E402
from draftmill.model.loss import BlockLoss  # noqa: E402
from draftmill.model.mask import BlockLayout  # noqa: E402
from draftmill.storage.store import open_store  # noqa: E402
from draftmill.train.batches import Batch  # noqa: E402
from draftmill.train.metrics import METRICS_FILE, MetricsLog, StepSums  # noqa: E402

pytestmark = pytest.mark.torch

BLOCK = 5


def micro(seed: int, num_blocks: int = 6, num_padding: int = 2) -> tuple[Batch, BlockLoss]:
    """A micro-batch of 20 tokens (4 of them filled up) whose slots are right by chance."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.arange(num_blocks + num_padding)
    anchors[num_blocks:] = -1
    lengths_N1 = torch.randint(1, BLOCK, (num_blocks + num_padding, 1), generator=generator)
    supervised_NJ = (torch.arange(BLOCK - 1) < lengths_N1) & (anchors[:, None] >= 0)
    correct_NJ = supervised_NJ & (torch.rand(supervised_NJ.shape, generator=generator) < 0.6)
    documents_T = torch.zeros(20, dtype=torch.long)
    documents_T[16:] = -1
    layout = BlockLayout(anchors, documents_T, torch.arange(20), BLOCK)
    ids = torch.zeros(num_blocks + num_padding, BLOCK, dtype=torch.long)
    batch = Batch(torch.zeros(20, 3), ids, layout, ids[:, 1:], supervised_NJ)
    nats = torch.rand((), generator=generator)
    return batch, BlockLoss(nats, supervised_NJ.sum().float(), correct_NJ)


def summed(*seeds: int) -> StepSums:
    sums = StepSums.empty(BLOCK - 1)
    for seed in seeds:
        sums.add(*micro(seed))
    return sums


def test_figures_are_those_of_a_naive_loop() -> None:
    record = summed(1, 2).record(step=1, epoch=0, lr=0.1, grad_norm=1.0)
    emitted, right, seen, nats, weight = [], [0] * (BLOCK - 1), [0] * (BLOCK - 1), 0.0, 0.0
    for seed in (1, 2):
        batch, loss = micro(seed)
        nats, weight = nats + float(loss.nats), weight + float(loss.weight)
        for block in range(6):
            flags = loss.correct_NJ[block].tolist()
            emitted.append(1 + num_accepted([int(flag) for flag in flags], [1] * len(flags)))
            for slot in range(BLOCK - 1):
                right[slot] += flags[slot]
                seen[slot] += bool(batch.supervised_NJ[block, slot])
    assert record["acceptance"] == pytest.approx(sum(emitted) / 12)
    assert record["slot_accuracy"] == [round(r / s, 4) for r, s in zip(right, seen, strict=True)]
    assert record["slot1_accuracy"] == pytest.approx(right[0] / 12)
    assert record["loss"] == pytest.approx(nats / weight)
    assert (record["tokens"], record["slots"]) == (32, sum(seen))


def test_sums_of_ranks_added_place_by_place_are_those_of_one() -> None:
    ranks = [summed(1, 2), summed(3), StepSums.empty(BLOCK - 1)]
    for seconds, sums in enumerate(ranks, 1):
        sums.seconds["target"], sums.span_s = float(seconds), 2.0 * seconds
    values = [sum(place) for place in zip(*(sums.values() for sums in ranks), strict=True)]
    whole, alone = StepSums.of_values(values, BLOCK - 1), summed(1, 2, 3)
    assert whole.ranks == 3 and whole.seconds["target"] == 6.0 and whole.span_s == 12.0
    whole.ranks, whole.seconds, whole.span_s = 1, alone.seconds, 0.0
    assert whole.nats == pytest.approx(alone.nats, rel=1e-15)
    whole.nats = alone.nats
    assert whole == alone


def test_shares_of_time_are_of_the_step_on_the_wall_and_so_are_tokens_per_second() -> None:
    sums = summed(1)
    sums.ranks, sums.wall_s = 2, 5.0
    sums.seconds |= {"target": 3.0, "drafter": 4.0, "optimizer": 0.5, "waiting": 0.5}  # two ranks, ten seconds
    record = sums.record(step=1, epoch=0, lr=0.1, grad_norm=1.0)
    phases = ("target", "drafter", "optimizer", "waiting")
    assert [record[f"{phase}_frac"] for phase in phases] == [0.3, 0.4, 0.05, 0.05]
    assert record["tokens_per_s"] == 16 / 5


def test_a_step_without_a_block_has_figures_all_the_same() -> None:
    record = StepSums.empty(BLOCK - 1).record(step=1, epoch=0, lr=0.1, grad_norm=0.0)
    assert (record["loss"], record["acceptance"], record["slot1_accuracy"]) == (0.0, 0.0, 0.0)
    assert record["slot_accuracy"] == [None] * (BLOCK - 1)


def line_of(step: int, loss: float | None = 0.5) -> dict[str, Any]:
    """What a step's line has at least."""
    return {"step": step, "loss": loss, "acceptance": 1.5, "slot1_accuracy": 0.25}


def encoded(*lines: dict[str, Any]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def test_a_log_taken_up_again_holds_every_step_once(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    first = MetricsLog((store,), 0)
    for step in (1, 2, 3):
        first.append(line_of(step))
    with (tmp_path / METRICS_FILE).open("ab") as stream:
        stream.write(b'{"step": 4, "lo')
    again = MetricsLog((store,), 2)
    again.append(line_of(3))
    assert [record["step"] for record in again.records()] == [1, 2, 3]
    assert store.get(METRICS_FILE) == encoded(line_of(1), line_of(2), line_of(3))


def test_a_log_that_others_wrote_to_holds_every_step_once_and_nothing_else(tmp_path: Path) -> None:
    strange = b'hello\n[1]\n{"a":1}\n\xff\n\n{"step":1}\n{"step":2,"loss":"low","acceptance":1,"slot1_accuracy":1}\n'
    lines = encoded(line_of(1), line_of(2, 1.0), line_of(2, None)) + strange + encoded(line_of(0), line_of(1, 3.0))
    (tmp_path / METRICS_FILE).write_bytes(lines)
    log = MetricsLog((open_store(str(tmp_path)),), 2)
    assert log.records() == [line_of(1, 3.0), line_of(2, None)]


@pytest.mark.parametrize("figure", ["loss", "acceptance", "slot1_accuracy"])
def test_a_line_that_lacks_a_figure_is_no_steps(tmp_path: Path, figure: str) -> None:
    cut = {name: value for name, value in line_of(2).items() if name != figure}
    (tmp_path / METRICS_FILE).write_bytes(encoded(line_of(1), cut, line_of(3)))
    log = MetricsLog((open_store(str(tmp_path)),), 3)
    assert log.last(9) == [line_of(1), line_of(3)]
    assert (tmp_path / METRICS_FILE).read_bytes() == encoded(line_of(1), line_of(3))


def test_a_disk_without_room_for_a_line_is_told(tmp_path: Path) -> None:
    log = MetricsLog((open_store(str(tmp_path)),), 0)
    log.append(line_of(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(log.whole) + 9, before[1]))
    try:
        with pytest.raises(StorageError, match=r"metrics\.jsonl cannot be written: File too large; free some space"):
            log.append(line_of(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert MetricsLog((open_store(str(tmp_path)),), 2).records() == [line_of(1)]
