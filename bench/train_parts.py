"""Where a training step's time goes: every part forward and backward by itself, its operations counted, and the share
of this machine's matrix-multiply peak that they reach.

`python bench/train_parts.py [anchors] [vocabulary rows] [context tokens]`; float32, one thread.
Counted are the products that the mathematics asks for: what a mask hides is not, nor what a kernel does twice.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import train_peers as sizes
from train_peers import BLOCK, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, TAPS, WIDTH

from draftmill.extract.taps import TapReader
from draftmill.extract.target import freeze
from draftmill.model.drafter import Drafter, DrafterLayer
from draftmill.model.grouped import GroupedAttention
from draftmill.model.loss import LossRule, Truth, block_loss
from draftmill.model.mask import BlockLayout, one_document
from draftmill.model.rope import rope_table
from draftmill.model.vocabulary import Objective

ROUNDS = 3
TARGET_LAYERS, TAP_IDS = 8, (1, 3, 5)
HEAD_CHANNELS = HEADS * HEAD_DIM
KV_CHANNELS = KV_HEADS * HEAD_DIM
# A product's backward is two products of its size, one where an input takes no gradient.
THRICE, TWICE = 3, 2


@dataclass(frozen=True)
class Part:
    """A part of a step: how many floating-point operations it stands for, and how it is run once."""

    name: str
    flop: float
    run: Callable[[], object]


def parts_of(num_anchors: int, vocab: int, context_len: int) -> list[Part]:
    """The parts of a step over one document with evenly spread anchors, in the order of their work."""
    torch.manual_seed(0)
    drafter = Drafter(sizes.drafter_shape(vocab))
    anchors_N = torch.linspace(1, context_len - 1, num_anchors).long()
    layout = one_document(anchors_N, context_len, BLOCK)
    return [
        target_part(vocab, context_len),
        context_part(drafter, context_len),
        projections_part(drafter, layout),
        attention_part(layout),
        feed_forward_part(drafter, layout),
        head_part(num_anchors, vocab),
    ]


def target_part(vocab: int, context_len: int) -> Part:
    """The frozen target over the context, up to the last tap; forward only."""
    from transformers import Qwen3ForCausalLM

    reader = TapReader(freeze(Qwen3ForCausalLM(sizes.qwen3_config(vocab, TARGET_LAYERS))), TAP_IDS)
    ids_RT, lengths_R = torch.randint(vocab, (1, context_len)), torch.tensor([context_len])
    num_layers = TAP_IDS[-1] + 1
    matrices = 2 * context_len * HIDDEN * (2 * HEAD_CHANNELS + 2 * KV_CHANNELS + 3 * WIDTH)
    pairs = context_len * (context_len + 1) / 2
    flop = num_layers * (matrices + 4 * HEAD_CHANNELS * pairs)
    return Part("target (forward)", flop, lambda: reader.read(ids_RT, lengths_R))


def context_part(drafter: Drafter, context_len: int) -> Part:
    """Features to context; features take no gradient."""
    features_TF, grad_TH = torch.randn(context_len, TAPS * HIDDEN), torch.randn(context_len, HIDDEN)
    flop = TWICE * 2 * context_len * TAPS * HIDDEN * HIDDEN
    return Part("context projection", flop, lambda: drafter.project(features_TF).backward(grad_TH))


def projections_part(drafter: Drafter, layout: BlockLayout) -> Part:
    """Queries, keys, values and outputs of every layer, their norms and rotations among them."""
    num_slots = layout.num_blocks * BLOCK
    table = rope_table(layout.key_positions_S, HEAD_DIM, drafter.shape.rope_theta)
    slots_table = (table[0][layout.context_len :], table[1][layout.context_len :])
    context_TH = torch.randn(layout.context_len, HIDDEN, requires_grad=True)
    blocks_QH = torch.randn(num_slots, HIDDEN, requires_grad=True)

    def run() -> None:
        for layer in layers_of(drafter):
            keys, values = layer.self_attn.keys_values(torch.cat([context_TH, blocks_QH]), table)
            output = layer.self_attn.output(layer.self_attn.queries(blocks_QH, slots_table))
            torch.autograd.backward([keys, values, output], [keys.detach(), values.detach(), output.detach()])

    matrices = 2 * HIDDEN * (num_slots * 2 * HEAD_CHANNELS + (num_slots + layout.context_len) * 2 * KV_CHANNELS)
    return Part("projections, norms, rotary", LAYERS * THRICE * matrices, run)


def attention_part(layout: BlockLayout) -> Part:
    """Every layer's attention over what its slots see."""
    num_slots = layout.num_blocks * BLOCK
    queries = torch.randn(HEADS, num_slots, HEAD_DIM, requires_grad=True)
    keys, values = (torch.randn(KV_HEADS, layout.context_len + num_slots, HEAD_DIM, requires_grad=True) for _ in "kv")
    grad = torch.randn(HEADS, num_slots, HEAD_DIM)

    def run() -> None:
        attend = GroupedAttention(layout, [None])
        for _ in range(LAYERS):
            attend(queries, keys, values, None).backward(grad)

    pairs = BLOCK * float((layout.anchors_N + BLOCK).sum())
    return Part("attention", LAYERS * THRICE * 4 * HEAD_CHANNELS * pairs, run)


def feed_forward_part(drafter: Drafter, layout: BlockLayout) -> Part:
    """Every layer's SwiGLU."""
    num_slots = layout.num_blocks * BLOCK
    blocks_QH = torch.randn(num_slots, HIDDEN, requires_grad=True)

    def run() -> None:
        for layer in layers_of(drafter):
            output_QH = layer.mlp(blocks_QH)
            output_QH.backward(output_QH.detach())

    return Part("feed-forward", LAYERS * THRICE * 2 * num_slots * 3 * HIDDEN * WIDTH, run)


def head_part(num_anchors: int, vocab: int) -> Part:
    """The loss through the frozen head, whose weight takes no gradient."""
    hidden_NJH = torch.randn(num_anchors, BLOCK - 1, HIDDEN, requires_grad=True)
    head_VH = torch.randn(vocab, HIDDEN) * 0.06
    truth = Truth(torch.ones(num_anchors, BLOCK - 1, dtype=torch.bool), torch.randint(vocab, (num_anchors, BLOCK - 1)))
    rule = LossRule("d-pace", sizes.GAMMA, 0.5, Objective(hard=1.0, kl=0.0, tv=0.0))
    flop = TWICE * 2 * num_anchors * (BLOCK - 1) * HIDDEN * vocab
    return Part("head and loss", flop, lambda: block_loss(hidden_NJH, truth, head_VH, rule).nats.backward())


def layers_of(drafter: Drafter) -> list[DrafterLayer]:
    """The drafter's layers, as what they are."""
    return [layer for layer in drafter.layers if isinstance(layer, DrafterLayer)]


def cpu_s(run: Callable[[], Any]) -> float:
    """The least CPU time of some rounds, after one that warms up."""
    run()
    spent = []
    for _ in range(ROUNDS):
        start = time.process_time()
        run()
        spent.append(time.process_time() - start)
    return min(spent)


def measure(num_anchors: int, vocab: int, context_len: int) -> dict[str, Any]:
    """Every part's CPU-seconds, operations and share of the peak; prints them as a table."""
    peak = sizes.matmul_flop_per_s()
    parts = parts_of(num_anchors, vocab, context_len)
    rows = [{"part": part.name, "cpu_s": cpu_s(part.run), "gflop": part.flop / 1e9} for part in parts]
    total_s = sum(float(row["cpu_s"]) for row in rows)
    print(f"  parts at {num_anchors} anchors, V {vocab}, {context_len} context tokens; peak {peak / 1e9:.0f} GFLOP/s")
    for row in rows:
        row["share_of_peak"] = 1e9 * float(row["gflop"]) / float(row["cpu_s"]) / peak
        print(
            f"    {row['part']:<28}{row['gflop']:>8.1f} GFLOP{row['cpu_s']:>8.3f} cpu-s"
            f"{100 * row['cpu_s'] / total_s:>6.0f} % of the time{100 * row['share_of_peak']:>6.0f} % of the peak"
        )
    return {"anchors": num_anchors, "vocab": vocab, "context": context_len, "peak_flop_per_s": peak, "parts": rows}


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = [int(word) for word in sys.argv[1:]]
    num_anchors, vocab, context_len = given + [64, 8_192, 512][len(given) :]
    print(json.dumps({"bench": "train_parts", **measure(num_anchors, vocab, context_len)}))
