"""A drafter's training step beside two peers' model classes, what it costs as it grows, where its time goes, and how
much of the target's work is padding. One run, less than ten minutes on an idle core.

Sizes and what differs between ours and theirs are told in `train_peers.py`; every measurement of a step is a process of
its own. Peers run where they are found:

    pip install --no-deps --target PEERS/specforge specforge==0.2.0
    pip install --no-deps --target PEERS/speculators speculators==0.9.0 hs-connectors==0.9.0 loguru pydantic-settings
    OMP_NUM_THREADS=1 python bench/train.py [PEERS]

SpecForge's loss must equal ours, or the comparison is refused.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import train_parts
from train_peers import BLOCK, CONTEXT, HIDDEN, LAYERS, ROUNDS

from draftmill.settings.train import TrainSettings
from draftmill.train.features import length_buckets
from draftmill.train.gate import KeptSample
from draftmill.train.rows import RowPlan

CASES = [(8_192, 64), (8_192, 256), (65_536, 64), (65_536, 256)]
# Cost per block position should not depend on how many blocks share a step.
GROWTH_VOCAB, GROWTH_ANCHORS = 8_192, (64, 128, 256, 512, 1_024)
PARTS = [(256, 8_192), (256, 65_536)]
SAME_LOSS = 1e-4
# The lengths of a real set of 902,087 samples: mean 2,068 tokens, 95th percentile 4,300, at most 10,800.
NUM_SAMPLES, LOG_MEAN, LOG_STD, MIN_TOKENS, MAX_TOKENS = 4_000, 7.493, 0.531, 20, 10_800
ROW_TOKENS = (3_072, 10_800, 65_536)


def measured(who: str, vocab: int, num_anchors: int, peers: Path) -> dict[str, float]:
    """`train_peers.measure` in a process of its own."""
    path = os.pathsep.join([str(peers / who), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(Path(__file__).with_name("train_peers.py")), who, str(vocab), str(num_anchors)]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{who} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def beside_peers(peers: Path) -> list[dict[str, Any]]:
    """Every case, ours and the peers that are there: time, memory, and both as multiples of ours."""
    there = [who for who in ("specforge", "speculators") if (peers / who).is_dir()]
    rows: list[dict[str, Any]] = []
    for vocab, num_anchors in CASES:
        found = {who: measured(who, vocab, num_anchors, peers) for who in ("ours", *there)}
        mine = found["ours"]
        if "specforge" in found and abs(found["specforge"]["loss"] - mine["loss"]) > SAME_LOSS * mine["loss"]:
            sys.exit(f"not the same step: our loss {mine['loss']}, SpecForge's {found['specforge']['loss']}")
        for who, one in found.items():
            times, memory = one["cpu_s"] / mine["cpu_s"], one["peak_bytes"] / mine["peak_bytes"]
            print(
                f"  V {vocab:>6} anchors {num_anchors:>5} {who:<12}{one['cpu_s']:>7.2f} cpu-s {times:>5.2f} x ours"
                f"{one['peak_bytes'] / 1e9:>7.2f} GB {memory:>5.2f} x ours   loss {one['loss']:.5f}"
            )
            rows.append({"who": who, "vocab": vocab, "anchors": num_anchors, **one, "times": times, "memory": memory})
    return rows


def growth(peers: Path) -> dict[str, Any]:
    """What a block position and an anchor cost from few anchors to many; of interleaved rounds the best."""
    rounds = [[measured("ours", GROWTH_VOCAB, anchors, peers) for anchors in GROWTH_ANCHORS] for _ in range(ROUNDS)]
    best = (min(ones, key=lambda one: one["cpu_s"]) for ones in zip(*rounds, strict=True))
    found = dict(zip(GROWTH_ANCHORS, best, strict=True))
    per_position = {anchors: one["cpu_s"] / (anchors * BLOCK) for anchors, one in found.items()}
    for anchors, one in found.items():
        print(
            f"  V {GROWTH_VOCAB:>6} anchors {anchors:>5} {1e6 * per_position[anchors]:>7.0f} us a block position"
            f"{one['peak_bytes'] / 1e9:>7.2f} GB"
        )
    least, most = GROWTH_ANCHORS[0], GROWTH_ANCHORS[-1]
    per_anchor = (found[most]["peak_bytes"] - found[least]["peak_bytes"]) / (most - least)
    spread = max(per_position.values()) / min(per_position.values())
    print(f"  dearest over cheapest position: {spread:.2f}; {per_anchor / 1e3:.0f} kB of peak memory an anchor")
    return {"us_per_position": per_position, "spread": spread, "peak_bytes_per_anchor": per_anchor}


def padding() -> dict[int, float]:
    """The share of the target's tokens that is padding, by how much a training row may hold."""
    drawn = np.random.default_rng(0).lognormal(LOG_MEAN, LOG_STD, NUM_SAMPLES)
    lengths = np.clip(drawn, MIN_TOKENS, MAX_TOKENS).astype(int).tolist()
    return {
        max_tokens: _padding([min(length, max_tokens) for length in lengths], max_tokens) for max_tokens in ROW_TOKENS
    }


def _padding(lengths: list[int], max_tokens: int) -> float:
    settings = TrainSettings(input="set", output=("run",), target="target", max_tokens=max_tokens)
    kept = tuple(KeptSample(i, length, length - 1) for i, length in enumerate(lengths))
    plan = RowPlan(1, lambda _part: kept, settings)
    padded = tokens = 0
    for step in range(plan.num_steps(1)):
        in_row = [lengths[i] for row in plan.micros_of(step) for i in row.samples]
        buckets = length_buckets(in_row, max_tokens)
        padded += sum(len(bucket) * max(in_row[i] for i in bucket) for bucket in buckets)
        tokens += sum(in_row)
    return (padded - tokens) / padded


def main(peers: Path) -> None:
    """Measures it all; the last line is the figures as JSON."""
    torch.set_num_threads(1)
    print(f"T {CONTEXT}, blocks of {BLOCK}, hidden {HIDDEN}, {LAYERS} layers, float32, 1 thread, best of {ROUNDS}")
    rows = beside_peers(peers)
    grown = growth(peers)
    parts = [train_parts.measure(anchors, vocab, CONTEXT) for anchors, vocab in PARTS]
    padded = padding()
    for max_tokens, share in padded.items():
        print(f"  rows of {max_tokens:>6} tokens: {100 * share:.2f} % of what the target reads is padding")
    print(json.dumps({"bench": "train", "rows": rows, "growth": grown, "parts": parts, "padding": padded}))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "peers"))
