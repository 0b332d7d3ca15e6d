"""Figures of a step: sums while it runs, one line of `metrics.jsonl` when it is whole.

`acceptance` estimates the acceptance length (bonus token included): the mean over anchors of 1 + the leading run of
slots whose most likely token is the text's own.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from draftmill.model.loss import BlockLoss
from draftmill.storage.store import Store
from draftmill.train.batches import Batch

METRICS_FILE = "metrics.jsonl"
PHASES = ("target", "drafter", "optimizer")


@dataclass
class StepSums:
    """Additive figures of one step's micro-batches, and the seconds each phase took."""

    nats: float = 0.0
    weight: float = 0.0
    tokens: int = 0
    blocks: int = 0
    slots: int = 0
    emitted: int = 0
    first_correct: int = 0
    correct_J: list[int] = field(default_factory=list)
    """For every drafted slot of a block, how often its most likely token was the label, and how often there was one."""
    supervised_J: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Adds the time spent inside to a phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def add(self, batch: Batch, loss: BlockLoss) -> None:
        """Adds one micro-batch."""
        leading_NJ = loss.correct_NJ.long().cumprod(dim=1)
        self.nats += float(loss.nats.detach())
        self.weight += float(loss.weight)
        num_blocks = int((batch.layout.anchors_N >= 0).sum())
        self.tokens += int((batch.layout.documents_T >= 0).sum())
        self.blocks += num_blocks
        self.slots += int(batch.supervised_NJ.sum())
        self.emitted += num_blocks + int(leading_NJ.sum())
        self.first_correct += int(leading_NJ[:, 0].sum())
        self.correct_J = _added(self.correct_J, loss.correct_NJ.sum(dim=0).tolist())
        self.supervised_J = _added(self.supervised_J, batch.supervised_NJ.sum(dim=0).tolist())

    @property
    def loss(self) -> float:
        """Mean weighted cross-entropy of the step, nats."""
        return self.nats / self.weight if self.weight else 0.0

    def note(self) -> str:
        """The step as progress shows it."""
        return f"loss {self.loss:.3f}  acceptance ~{self.emitted / max(self.blocks, 1):.2f}"

    def record(self, *, step: int, epoch: int, lr: float, grad_norm: float) -> dict[str, Any]:
        """The step's line; a loss or norm that is not finite is written as null."""
        total = sum(self.seconds.values())
        return {
            "step": step,
            "epoch": epoch,
            "loss": self.loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "acceptance": self.emitted / max(self.blocks, 1),
            "slot1_accuracy": self.first_correct / max(self.blocks, 1),
            "slot_accuracy": [
                round(right / count, 4) if count else None
                for right, count in zip(self.correct_J, self.supervised_J, strict=True)
            ],
            "tokens": self.tokens,
            "slots": self.slots,
            "tokens_per_s": round(self.tokens / max(total, 1e-9), 1),
            **{f"{phase}_frac": round(self.seconds[phase] / max(total, 1e-9), 3) for phase in PHASES},
        }


def _added(sums: list[int], more: list[int]) -> list[int]:
    return [a + b for a, b in zip(sums or [0] * len(more), more, strict=True)]


class MetricsLog:
    """`metrics.jsonl`: a line a step, each step once. Local folders see lines at once, object stores at checkpoints."""

    def __init__(self, stores: tuple[Store, ...], step: int) -> None:
        """Takes up the log of a run that stands at `step`: later lines, and a torn one, are cut off."""
        self._stores = stores
        self.lines = _lines_until(stores[0].find(METRICS_FILE) or b"", step)
        self.publish()

    def append(self, record: dict[str, Any]) -> None:
        """Adds the line of a step."""
        line = msgspec.json.encode(record) + b"\n"
        self.lines.append(line)
        for store in self._stores:
            if store.folder:
                with (store.folder / METRICS_FILE).open("ab") as stream:
                    stream.write(line)

    def publish(self) -> None:
        """Writes the whole log to every store."""
        for store in self._stores:
            store.put(METRICS_FILE, b"".join(self.lines))

    def last(self, count: int) -> list[dict[str, Any]]:
        """The records of the last `count` steps."""
        return [msgspec.json.decode(line) for line in self.lines[-count:]]


def _lines_until(data: bytes, step: int) -> list[bytes]:
    whole = data[: data.rfind(b"\n") + 1]
    lines = [line + b"\n" for line in whole.split(b"\n") if line]
    return [line for line in lines if msgspec.json.decode(line)["step"] <= step]
