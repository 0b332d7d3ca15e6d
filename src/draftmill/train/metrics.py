"""Figures of a step: sums while it runs, one line of `metrics.jsonl` when it is whole.

`acceptance` is the mean accepted length over the step's anchors (bonus token included): 1 + the leading run of slots
whose most likely token is the label. What serving sees starts at an answer's first token instead: `held_out.py`.

A step lasts from the end of the one before to its own, so that the seconds of all steps are those of a clock on the
wall, and shares of them may leave a rest (packing, uploads, a checkpoint). Target ranks of placement split read ahead
of the step: their shares are of their own time from row to row.
"""

import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from draftmill.model.loss import BlockLoss
from draftmill.storage.local import no_room
from draftmill.storage.store import Store
from draftmill.train.batches import Batch
from draftmill.train.clock import Clock

METRICS_FILE = "metrics.jsonl"
# Waiting: for the plan of the step, and where others make the states, for these. Held: a target rank, for room to put
# them.
DRAFTER_PHASES = ("drafter", "optimizer", "waiting")
TARGET_PHASES = ("target", "held")
PHASES = (*TARGET_PHASES, *DRAFTER_PHASES)
# Where one side stands idle for longer than this share of a step, it waits for the other.
IDLE_FRAC = 0.1
_RSS_UNIT_BYTES = 1024  # what Linux counts resident memory in


@dataclass
class StepSums:
    """Sums and counts over the micro-batches of one step, of one rank; sums of several ranks are added up."""

    nats: float = 0.0
    weight: float = 0.0
    tokens: int = 0
    blocks: int = 0
    slots: int = 0
    emitted: int = 0
    ranks: int = 1
    target_ranks: int = 0
    """Ranks that do nothing but read with the target; 0: the others do it themselves. Not a sum."""
    in_flight_bytes: int = 0
    """Over all rows, what their target rank had on its way when it sent their states."""
    span_s: float = 0.0
    """Over all rows, what their target rank took from the row before to this one."""
    rows: int = 0
    num_poisoned: int = 0
    poisoned: list[str] = field(default_factory=list)
    """Samples that nothing was learnt from, because their states are not finite; this rank's alone."""
    correct_J: list[int] = field(default_factory=list)
    """For every drafted slot of a block, how often its most likely token was the label, and how often there was one."""
    supervised_J: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """What each phase took, of all ranks that have it."""
    follows_measuring: bool = False
    """Whether the step waited for held-out figures of the one before: what waits for what says nothing then. No sum."""
    wall_s: float = 0.0
    """Seconds of the step, told when it is whole. Not a sum: ranks end a step together."""
    clock: Clock = field(default=time.perf_counter, compare=False, repr=False)

    @staticmethod
    def empty(num_drafted: int, clock: Clock = time.perf_counter) -> "StepSums":
        """The sums of a step before its first micro-batch, for blocks of `num_drafted` drafted slots."""
        return StepSums(correct_J=[0] * num_drafted, supervised_J=[0] * num_drafted, clock=clock)

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Adds the time spent inside to a phase; sums of several ranks stand for all of them."""
        start = self.clock()
        yield
        self.seconds[phase] += self.ranks * (self.clock() - start)

    def add(self, batch: Batch, loss: BlockLoss) -> None:
        """Adds one micro-batch; its figures leave the device together, in float64."""
        leading_NJ = loss.correct_NJ.long().cumprod(dim=1)
        is_token_T, is_block_N = batch.layout.documents_T >= 0, batch.layout.anchors_N >= 0
        counts = (is_token_T.sum(), is_block_N.sum(), batch.supervised_NJ.sum(), leading_NJ.sum())
        per_slot = (loss.correct_NJ.sum(dim=0), batch.supervised_NJ.sum(dim=0))
        figures = [figure.double().reshape(-1) for figure in (loss.nats.detach(), loss.weight, *counts, *per_slot)]
        nats, weight, tokens, blocks, slots, accepted, *slot_counts = torch.cat(figures).tolist()
        self.nats += nats
        self.weight += weight
        self.tokens += int(tokens)
        self.blocks += int(blocks)
        self.slots += int(slots)
        self.emitted += int(blocks + accepted)
        num_drafted = len(self.correct_J)
        self.correct_J = _added(self.correct_J, slot_counts[:num_drafted])
        self.supervised_J = _added(self.supervised_J, slot_counts[num_drafted:])
        self._add_toll(batch)

    def _add_toll(self, batch: Batch) -> None:
        self.rows += 1
        self.seconds["target"] += batch.toll.target_s
        self.seconds["waiting"] += batch.toll.waiting_s
        self.seconds["held"] += batch.toll.held_s
        self.in_flight_bytes += batch.toll.in_flight_bytes
        self.span_s += batch.toll.span_s
        self.poisoned += batch.poisoned
        self.num_poisoned += len(batch.poisoned)

    def values(self) -> list[float]:
        """All sums in one flat list of fixed length, so that ranks add theirs in a single reduction (in float64)."""
        scalars = (self.nats, self.weight, self.tokens, self.blocks, self.slots, self.emitted, self.ranks)
        flow = (self.in_flight_bytes, self.span_s, self.rows, self.num_poisoned)
        return [*scalars, *flow, *self.correct_J, *self.supervised_J, *self.seconds.values()]

    @staticmethod
    def of_values(values: Sequence[float], num_drafted: int) -> "StepSums":
        """The sums that `values` lists, or those of several ranks, added up place by place."""
        nats, weight, tokens, blocks, slots, emitted, ranks, *more = values
        in_flight_bytes, span_s, rows, num_poisoned, *rest = more
        counts = [int(count) for count in rest[: 2 * num_drafted]]
        return StepSums(
            nats=nats,
            weight=weight,
            tokens=int(tokens),
            blocks=int(blocks),
            slots=int(slots),
            emitted=int(emitted),
            ranks=int(ranks),
            in_flight_bytes=int(in_flight_bytes),
            span_s=span_s,
            rows=int(rows),
            num_poisoned=int(num_poisoned),
            correct_J=counts[:num_drafted],
            supervised_J=counts[num_drafted:],
            seconds=dict(zip(PHASES, rest[2 * num_drafted :], strict=True)),
        )

    @property
    def loss(self) -> float:
        """The weighted mean of what the step's slots cost: `hard_weight` times cross-entropy, `kl_weight` times KL
        (both in nats) and `tv_weight` times total variation; by default cross-entropy alone."""
        return self.nats / self.weight if self.weight else 0.0

    def frac(self, phase: str) -> float:
        """A phase's share of the time of the ranks that have it; 0 where none has passed."""
        is_apart = self.target_ranks and phase in TARGET_PHASES
        whole_s = self.span_s if is_apart else self.wall_s * self.ranks
        return self.seconds[phase] / whole_s if whole_s else 0.0

    def balance(self) -> dict[str, Any]:
        """Placement split: what waits for what, and which side should be given more ranks."""
        in_flight = self.in_flight_bytes // max(self.rows, 1)
        return {"held_frac": round(self.frac("held"), 3), "in_flight_bytes": in_flight, "grow": self._grow()}

    def _grow(self) -> str | None:
        if self.follows_measuring:
            return None
        if self.frac("waiting") > IDLE_FRAC:
            return "target"
        return "drafter" if self.frac("held") > IDLE_FRAC else None

    def note(self) -> str:
        """The step as progress shows it."""
        learnt = f"loss {self.loss:.3f}  acceptance ~{self.emitted / max(self.blocks, 1):.2f}"
        if not self.target_ranks or self.follows_measuring:
            return learnt
        balance = self.balance()
        # Steps that draw again from states that are there have cost no target anything.
        reading = f"target busy {self.frac('target'):.0%}  " if self.span_s else ""
        waits = f"waiting {self.frac('waiting'):.0%}  in flight {balance['in_flight_bytes'] / 1e6:,.1f} MB"
        return f"{learnt}  {reading}drafter busy {self.frac('drafter'):.0%}  {waits}" + (
            f"  (more {balance['grow']} ranks would help)" if balance["grow"] else ""
        )

    def record(self, *, step: int, epoch: int, lr: float, grad_norm: float) -> dict[str, Any]:
        """The step's line; a loss or norm that is not finite is written as null."""
        return {
            "step": step,
            "epoch": epoch,
            "loss": self.loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "acceptance": self.emitted / max(self.blocks, 1),
            "slot1_accuracy": self.correct_J[0] / max(self.supervised_J[0], 1),
            "slot_accuracy": [
                round(right / count, 4) if count else None
                for right, count in zip(self.correct_J, self.supervised_J, strict=True)
            ],
            "tokens": self.tokens,
            "slots": self.slots,
            "tokens_per_s": round(self.tokens / max(self.wall_s, 1e-9), 1),
            **{f"{phase}_frac": round(self.frac(phase), 3) for phase in DRAFTER_PHASES + TARGET_PHASES[:1]},
            **(self.balance() if self.target_ranks else {}),
        }


def _added(sums: Sequence[int], more: Sequence[float]) -> list[int]:
    return [a + int(b) for a, b in zip(sums, more, strict=True)]


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far: the CUDA device's, or this process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT_BYTES


class MetricsLog:
    """`metrics.jsonl`: a line a step, each step once. Local folders see lines at once, object stores at checkpoints."""

    def __init__(self, stores: tuple[Store, ...], step: int) -> None:
        """Takes up the log of a run that stands at `step`: later lines, and a torn one, are cut off."""
        self._stores = stores
        self.lines = _lines_until(stores[0].find(METRICS_FILE) or b"", step)
        self._publish()

    def append(self, record: dict[str, Any]) -> None:
        """Adds the line of a step; StorageError where a disk has no room for it."""
        line = msgspec.json.encode(record) + b"\n"
        self.lines.append(line)
        for path in (store.folder / METRICS_FILE for store in self._stores if store.folder):
            try:
                with path.open("ab") as stream:
                    stream.write(line)
            except OSError as error:
                raise no_room(error, path) from error

    def complete(self, figures: dict[str, Any]) -> None:
        """Adds figures to the line of the last step, in every store."""
        (record,) = self.last(1)
        self.lines[-1] = msgspec.json.encode(record | figures) + b"\n"
        self._publish()

    @property
    def whole(self) -> bytes:
        """The log so far, as it is written."""
        return b"".join(self.lines)

    def _publish(self) -> None:
        """Writes the whole log to every store."""
        for store in self._stores:
            store.put(METRICS_FILE, self.whole)

    def records(self) -> list[dict[str, Any]]:
        """The records of all steps so far."""
        return [msgspec.json.decode(line) for line in self.lines]

    def last(self, count: int) -> list[dict[str, Any]]:
        """The records of the last `count` steps."""
        return [msgspec.json.decode(line) for line in self.lines[-count:]]


def _lines_until(data: bytes, step: int) -> list[bytes]:
    """The lines of the steps until `step`, in order: the last one of each, without what is no step's line."""
    found = {}
    for line in data[: data.rfind(b"\n") + 1].split(b"\n"):
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            if 0 < (at := msgspec.json.decode(line, type=_Line).step) <= step:
                found[at] = line + b"\n"
    return [line for _, line in sorted(found.items())]


class _Line(msgspec.Struct):
    """What a step's line has at least: without figures it is no step's."""

    step: int
    loss: float | None
    acceptance: float
    slot1_accuracy: float
