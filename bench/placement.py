"""Does the drafter learn while the target reads? Placement split against each side alone, and against one process.

A random Llama-shaped target and a drafter that take about the same time a row, one thread a rank, on a machine with a
core for each: wall time of the steps, from all ranks being ready to the last step's end, in interleaved rounds. Then
what crosses between the ranks in other placements (there cores are shared, so only bytes and shares are told).

    python bench/placement.py [STEPS] [ROUNDS]
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean, median
from typing import Any

import numpy as np
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftmill.extract.taps import TapReader
from draftmill.extract.target import Target, freeze
from draftmill.model.forms import attention_form
from draftmill.settings.train import TrainSettings
from draftmill.train.batches import Batches, BatchRule
from draftmill.train.features import DocumentStates, OwnTarget, RowSource, RowStates, TargetFeatures, Toll
from draftmill.train.interruption import Stop
from draftmill.train.launch import start_ranks
from draftmill.train.layout import Layout
from draftmill.train.loop import LossOf, Schedule, train
from draftmill.train.metrics import StepSums
from draftmill.train.ranks import Ranks, joined
from draftmill.train.rows import PlannedRow
from draftmill.train.samples import Sample
from draftmill.train.start import initial_drafter, tap_ids_of
from draftmill.train.state import new_run
from draftmill.train.transit import Arriving, Inbox, Outbox, Supply, Traffic

STEPS, ROUNDS, WARM_STEPS = 100, 5, 3
TOKENS, HIDDEN, LAYERS, VOCAB, ANCHORS, SAMPLES, MASK_ID = 512, 256, 9, 4_096, 24, 16, 4_095
SIDE = "DRAFTMILL_BENCH_SIDE"
TIMEOUT = timedelta(minutes=10)
# Five rows: neither side waits for room as long as both keep pace.
IN_FLIGHT_BYTES = 8 << 20
TAPS = 3
STATE_BYTES = TAPS * HIDDEN * 4
# Bare sends of one row's states, timed and counted before the steps.
NUM_PROBES = 20
ALONE = Layout(1, 1, is_split=False)
SPLITS = {"1+1": (1, 1), "2+1": (2, 1), "1+2": (1, 2), "2+2": (2, 2)}


@dataclass(frozen=True)
class Ready:
    """Every row's states at hand, as if a target of no cost had read them."""

    states: DocumentStates

    def read(self, documents: Sequence[Sample]) -> RowStates:
        """The same states for every row."""
        return RowStates([self.states] * len(documents), Toll())


def random_target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 3 * HIDDEN, "max_position_embeddings": 2048},
    )
    return freeze(LlamaForCausalLM(config))


def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    mask = np.arange(TOKENS) >= TOKENS // 8
    return [Sample(f"s{i}", rng.integers(0, VOCAB - 1, TOKENS), mask) for i in range(SAMPLES)]


def micros_of(settings: TrainSettings, step: int) -> list[PlannedRow]:
    numbers = range(step * settings.rows_per_step, (step + 1) * settings.rows_per_step)
    return [PlannedRow(m // SAMPLES, (m % SAMPLES,), (TOKENS,), (ANCHORS,), 0, m) for m in numbers]


@dataclass
class Side:
    """One rank with all that it may need."""

    settings: TrainSettings
    ranks: Ranks
    target: Target

    @property
    def traffic(self) -> Traffic:
        width = self.settings.num_taps * HIDDEN
        rows = lambda step: micros_of(self.settings, step)  # noqa: E731
        return Traffic(rows, lambda step: True, 0, self.num_steps, 1, width, torch.float32)

    def rows(self) -> list[PlannedRow]:
        return [row for step in self.traffic.visits() for row in self.traffic.micros_of(step)]

    @property
    def num_steps(self) -> int:
        assert self.settings.num_steps is not None
        return self.settings.num_steps

    def own_target(self) -> OwnTarget:
        reader = TapReader(self.target, tap_ids_of(self.target, self.settings))
        return OwnTarget(TargetFeatures(reader, self.target.device, max_tokens=TOKENS, cache_bytes=0))

    def source(self, name: str) -> RowSource:
        if name == "one process":
            return self.own_target()
        if name == "drafter alone":
            return Ready(self.own_target().read(samples()[:1]).documents[0])
        inbox = Inbox(self.ranks, self.traffic, self.settings.in_flight_bytes, TIMEOUT)
        return Arriving(inbox.take, self.traffic.width)

    def read(self, name: str) -> None:
        """What a target rank does; alone it sends nothing."""
        if name == "target alone":
            source = self.own_target()
            for row in self.rows():
                source.read([samples_of[i] for i in row.samples])
        else:
            outbox = Outbox(self.ranks, self.traffic, self.settings.in_flight_bytes, TIMEOUT)
            Supply(self.ranks, self.traffic, samples_of, self.own_target()).run(outbox, Stop())  # type: ignore[arg-type]

    def learn(self, name: str) -> dict[str, float]:
        """What a drafter rank does; which share of the steps it waited for states, and target ranks for room."""
        idle: dict[str, list[float]] = {"waiting": [], "held": []}

        def note(sums: StepSums, *_: object) -> None:
            for phase, fracs in idle.items():
                fracs.append(sums.frac(phase))

        settings, rule = self.settings, BatchRule.of(self.settings, is_constant=False, num_drafters=1)
        run = new_run(initial_drafter(self.target, settings, MASK_ID), settings)
        attention = attention_form("auto", run.drafter.shape, self.target.device)
        batches = Batches(samples_of, self.source(name), run.drafter.shape, 0, rule)  # type: ignore[arg-type]
        loss_of = LossOf(self.target, settings, (), attention)
        rows = lambda step: micros_of(settings, step)  # noqa: E731
        train(run, Schedule(self.num_steps, rows, batches.batch_at, loss_of, self.ranks), settings, note)
        return {f"{phase}_frac": fmean(fracs) for phase, fracs in idle.items()}

    def probe(self) -> float:
        """Seconds that one row's states take between two ranks with nothing else to do, from the word to send them."""
        inbox = Inbox(self.ranks, self.traffic, 1, TIMEOUT) if self.ranks.has_drafter else None
        outbox, states_TW = Outbox(self.ranks, self.traffic, 1, TIMEOUT), torch.zeros(TOKENS, self.traffic.width)
        took = []
        for row in self.rows():
            self.ranks.tell(None)
            start = time.perf_counter()
            if inbox is not None and self.ranks.layout.drafter_of(row) == self.ranks.rank:
                inbox.take()
                took.append(time.perf_counter() - start)
            elif self.ranks.layout.target_of(row) == self.ranks.rank:
                outbox.send(row, states_TW, 0.0)
                outbox.settle()
        self.ranks.tell(None, source=self.ranks.layout.world - 1)  # which has nothing under way any more
        return median(took) if took else 0.0


samples_of = samples()


def be_side(settings: TrainSettings) -> dict[str, Any]:
    """The story of a rank: the same steps twice, a few to warm up, then those that are timed."""
    name = os.environ[SIDE]
    with joined(settings) as ranks:
        target = random_target()
        told: dict[str, Any] = {}
        if ranks.layout.is_split:
            probes = {"num_steps": NUM_PROBES, "rows_per_step": 1}
            before = sent_on_loopback()
            told["probe_s"] = Side(settings.model_copy(update=probes), ranks, target).probe()
            told["sent_bytes_per_token"] = (sent_on_loopback() - before) / (NUM_PROBES * TOKENS)
        for num_steps in (WARM_STEPS, settings.num_steps):
            side = Side(settings.model_copy(update={"num_steps": num_steps}), ranks, target)
            ranks.tell(None)
            start = time.perf_counter()
            if name == "target alone" or not ranks.has_drafter:
                side.read(name)
            else:
                told |= side.learn(name)
            told["wall_s"] = time.perf_counter() - start
        card = ranks.tell(told)
    assert card is not None
    return card


def sent_on_loopback() -> int:
    """Bytes that all processes of this host have sent one another."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def measure(name: str, num_steps: int, layout: Layout = ALONE) -> dict[str, Any]:
    """One start of one side, alone or with the others."""
    chosen: dict[str, Any] = {"input": "i", "output": ("o",), "target": "t", "num_layers": 2, "num_taps": TAPS}
    chosen |= {"num_anchors": ANCHORS, "max_tokens": TOKENS, "in_flight_bytes": IN_FLIGHT_BYTES, "num_steps": num_steps}
    if layout.is_split:
        chosen |= {"placement": "split", "target_ranks": layout.num_targets, "drafter_ranks": layout.num_drafters}
        chosen |= {"rows_per_step": max(layout.num_targets, layout.num_drafters)}
    os.environ[SIDE] = name
    return start_ranks(be_side, TrainSettings(**chosen), layout)


def bench_overlap(num_steps: int, rounds: int) -> dict[str, float]:
    """Median wall seconds of each way over interleaved rounds, and the median of the rounds' ratios."""
    ways = dict.fromkeys(("target alone", "drafter alone", "one process"), ALONE) | {"split 1+1": split("1+1")}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, layout in ways.items():
            found[name].append(measure(name, num_steps, layout)["wall_s"])
        print(f"  round {number + 1}: " + "  ".join(f"{name} {times[-1]:.2f} s" for name, times in found.items()))
    slower = [max(pair) for pair in zip(found["target alone"], found["drafter alone"], strict=True)]
    ratios = {
        "split_over_slower_side": median(w / s for w, s in zip(found["split 1+1"], slower, strict=True)),
        "one_process_over_slower_side": median(w / s for w, s in zip(found["one process"], slower, strict=True)),
    }
    return {f"{name.replace(' ', '_')}_s": median(times) for name, times in found.items()} | ratios


def split(name: str) -> Layout:
    targets, drafters = SPLITS[name]
    return Layout(drafters, targets, is_split=True)


def bench_transfers(num_steps: int) -> dict[str, dict[str, float]]:
    """Per placement what crosses: bytes a token, counted, and what share of a step its sends would take if nothing else
    were done meanwhile; then how long either side really stood idle."""
    found = {}
    for name in SPLITS:
        told = measure("split", num_steps, split(name))
        rows = num_steps * max(SPLITS[name]) / SPLITS[name][1]  # that one drafter rank receives
        found[name] = told | {"bare_send_frac": told["probe_s"] * rows / told["wall_s"]}
        print(
            f"  {name}: {told['sent_bytes_per_token']:,.0f} bytes sent a token (states: {STATE_BYTES:,}), bare sends "
            f"{found[name]['bare_send_frac']:.2%} of the step; drafter waits {told['waiting_frac']:.1%}, "
            f"target is held {told['held_frac']:.1%}; {told['wall_s']:.2f} s"
        )
    return found


def main() -> None:
    """Prints tables and ratios, and one JSON line."""
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS
    print(
        f"{num_steps} steps of {TOKENS} tokens and {ANCHORS} blocks of 16; target {LAYERS} layers, drafter 2, hidden "
        f"{HIDDEN}, float32; one thread a rank on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    overlap = bench_overlap(num_steps, rounds)
    for key, value in overlap.items():
        print(f"  {key.replace('_', ' '):<32}{value:>8.3f}")
    transfers = bench_transfers(num_steps)
    print(json.dumps({"bench": "placement", **overlap, "transfers": transfers}))


if __name__ == "__main__":
    main()
