"""A drafter's training step, forward and backward, against the model classes of two peers: CPU-seconds and peak memory.

Same weights, same fixed anchors, same labels, cross-entropy with decay, float32, one thread: T = 2,048 context tokens,
blocks of 16, hidden 256, 2 layers. Every measurement is a process of its own. Peers run where they are found:

    pip install --no-deps --target PEERS/specforge specforge==0.2.0
    pip install --no-deps --target PEERS/speculators speculators==0.9.0 hs-connectors==0.9.0 loguru pydantic-settings
    python bench/train.py [PEERS]

What differs and is said, not hidden: speculators takes the target's most likely token for a label, for which it applies
the head once more (its way of working, so it counts), and skips a text's last block; both peers build a dense mask on
a CPU. SpecForge's loss must equal ours, or the comparison is refused.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CONTEXT, BLOCK, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, TAPS = 2_048, 16, 256, 2, 4, 2, 64, 512, 3
GAMMA, MASK_ID, ROUNDS = 7.0, 5, 2
CASES = [(8_192, 64), (8_192, 256), (65_536, 64), (65_536, 256)]
OURS_ALONE = [(8_192, 1_024)]

Step = Callable[[], Tensor]


def weights() -> dict[str, Tensor]:
    """The drafter's weights by their z-lab names, the same for everybody."""
    torch.manual_seed(0)
    sizes = {"fc": (HIDDEN, TAPS * HIDDEN), "hidden_norm": (HIDDEN,), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        sizes |= {f"{at}.input_layernorm": (HIDDEN,), f"{at}.post_attention_layernorm": (HIDDEN,)}
        sizes |= {f"{at}.self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), f"{at}.self_attn.q_norm": (HEAD_DIM,)}
        sizes |= {f"{at}.self_attn.{kv}_proj": (KV_HEADS * HEAD_DIM, HIDDEN) for kv in "kv"}
        sizes |= {f"{at}.self_attn.k_norm": (HEAD_DIM,), f"{at}.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM)}
        sizes |= {f"{at}.mlp.{part}_proj": (WIDTH, HIDDEN) for part in ("gate", "up")}
        sizes |= {f"{at}.mlp.down_proj": (HIDDEN, WIDTH)}
    return {f"{k}.weight": torch.ones(s) if len(s) == 1 else torch.randn(s) * 0.04 for k, s in sizes.items()}


def inputs(vocab: int, num_anchors: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Token ids, features, embedding, head, anchors."""
    torch.manual_seed(1)
    ids, features = torch.randint(6, vocab, (CONTEXT,)), torch.randn(CONTEXT, TAPS * HIDDEN)
    embed, head = torch.randn(vocab, HIDDEN), torch.randn(vocab, HIDDEN) * 0.06
    anchors = (torch.randperm(CONTEXT - 2 * BLOCK)[:num_anchors] + 1).sort().values
    return ids, features, embed, head, anchors


def ours(vocab: int, num_anchors: int) -> tuple[nn.Module, Step]:
    """Our drafter, grouped attention, tiled loss."""
    from draftmill.model.attention import GroupedAttention
    from draftmill.model.drafter import Drafter
    from draftmill.model.loss import LossRule, Truth, block_loss
    from draftmill.model.mask import one_document
    from draftmill.model.shape import FULL, DrafterShape
    from draftmill.model.vocabulary import Objective

    shape = DrafterShape(
        **{"hidden_size": HIDDEN, "num_layers": LAYERS, "num_heads": HEADS, "num_kv_heads": KV_HEADS},
        **{"head_dim": HEAD_DIM, "intermediate_size": WIDTH, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
        **{"max_positions": 4096, "vocab_size": vocab, "block_size": BLOCK, "tap_ids": (1, 3, 5), "mask_id": MASK_ID},
        **{"num_target_layers": 8, "layer_types": (FULL,) * LAYERS},
    )
    drafter = Drafter(shape)
    drafter.load_state_dict(weights())
    ids, features, embed, head, anchors = inputs(vocab, num_anchors)
    rule = LossRule("decay", GAMMA, 0.5, Objective(hard=1.0, kl=0.0, tv=0.0))

    def step() -> Tensor:
        layout = one_document(anchors, CONTEXT, BLOCK)
        block_ids = torch.full((num_anchors, BLOCK), MASK_ID)
        block_ids[:, 0] = ids[anchors]
        context = drafter.project(features)
        hidden = drafter(embed[block_ids].flatten(0, 1), context, layout, GroupedAttention(layout, [None]))
        truth = Truth(torch.ones(num_anchors, BLOCK - 1, dtype=torch.bool), ids[layout.slots_NB[:, 1:]])
        loss = block_loss(hidden.unflatten(0, (num_anchors, BLOCK))[:, 1:], truth, head, rule)
        return loss.nats / loss.weight

    return drafter, step


def qwen3_config(vocab: int) -> Any:
    """The drafter's shape as transformers says it."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        **{"vocab_size": vocab, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS},
        **{"num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": WIDTH, "rms_norm_eps": 1e-6},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "max_position_embeddings": 4096},
    )
    config._attn_implementation = "sdpa"
    return config


def specforge(vocab: int, num_anchors: int) -> tuple[nn.Module, Step]:
    """SpecForge's online model, its SDPA back end, its chunked loss."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel  # pyright: ignore
    from specforge.modeling.draft.dflash import DFlashDraftModel  # pyright: ignore

    ids, features, embed, head, anchors = inputs(vocab, num_anchors)
    config = qwen3_config(vocab)
    config.block_size, config.num_target_layers = BLOCK, 8
    config.dflash_config = {"target_layer_ids": [1, 3, 5], "mask_token_id": MASK_ID}
    drafter = DFlashDraftModel(config)
    drafter.load_state_dict(weights())

    class Fixed(OnlineDFlashModel):
        def _sample_anchor_positions(self, seq_len, loss_mask, device):
            return anchors[None], torch.ones(1, num_anchors, dtype=torch.bool)

    model = Fixed(
        drafter,
        _linear(head),
        nn.Embedding.from_pretrained(embed),
        MASK_ID,
        BLOCK,
        attention_backend="sdpa",
        num_anchors=num_anchors,
        loss_decay_gamma=GAMMA,
    )
    return drafter, lambda: model(ids[None], features[None], torch.ones(1, CONTEXT))[0]


def speculators(vocab: int, num_anchors: int) -> tuple[nn.Module, Step]:
    """speculators' model with SDPA and its eager cross-entropy (its fused kernels are Triton's)."""
    from speculators.losses import resolve_loss_config  # pyright: ignore
    from speculators.models.dflash import DFlashSpeculatorConfig, core  # pyright: ignore

    ids, features, embed, head, anchors = inputs(vocab, num_anchors)
    config = DFlashSpeculatorConfig(
        **{"transformer_layer_config": qwen3_config(vocab), "draft_vocab_size": vocab, "block_size": BLOCK},
        **{"aux_hidden_state_layer_ids": [2, 4, 6], "mask_token_id": MASK_ID},
    )
    config.transformer_layer_config._attn_implementation = "sdpa"
    core.select_anchors = lambda *_: (anchors, torch.ones(num_anchors, dtype=torch.bool))
    model = core.DFlashDraftModel(config)
    model.load_state_dict(weights(), strict=False)
    for module, table in ((model.embed_tokens, embed), (model.lm_head, head), (model.verifier_lm_head, head)):
        module.weight = nn.Parameter(table, requires_grad=False)
    last, documents = torch.randn(1, CONTEXT, HIDDEN), torch.zeros(1, CONTEXT, dtype=torch.long)
    loss_config = resolve_loss_config("ce", "eager")

    def step() -> Tensor:
        return model(
            features[None],
            ids[None],
            torch.ones(1, CONTEXT),
            last,
            documents,
            loss_config=loss_config,
            gamma=GAMMA,
            max_anchors=num_anchors,
        )[1]

    return model, step


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def work(who: str, vocab: int, num_anchors: int) -> dict[str, float]:
    """One process's measurement: the best of some rounds, and how far the first pushed its peak memory."""
    torch.set_num_threads(1)
    module, step = {"ours": ours, "specforge": specforge, "speculators": speculators}[who](vocab, num_anchors)
    module.train()
    before, spent, peak, loss = _peak_bytes(), [], 0, 0.0
    for round_ in range(ROUNDS):
        module.zero_grad(set_to_none=True)
        start = time.process_time()
        mean = step()
        mean.backward()
        spent.append(time.process_time() - start)
        loss, peak = float(mean.detach()), peak if round_ else _peak_bytes() - before
    size = 2048
    left, right = torch.randn(size, size), torch.randn(size, size)
    start = time.process_time()
    left @ right
    flop_per_s = 2 * size**3 / (time.process_time() - start)
    return {"cpu_s": min(spent), "peak_bytes": peak, "loss": loss, "peak_flop_per_s": flop_per_s}


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def flop(vocab: int, num_anchors: int) -> dict[str, float]:
    """Operations of our step by part; the frozen head has an input's gradient only, features have none."""
    slots, per_key = num_anchors * BLOCK, 4 * HEADS * HEAD_DIM
    queries = 2 * HIDDEN * (2 * HEADS * HEAD_DIM + 3 * WIDTH)
    key_values = 2 * HIDDEN * 2 * KV_HEADS * HEAD_DIM
    # Anchors are spread evenly: a block sees half the context on average, and itself.
    attention = 3 * LAYERS * slots * per_key * (CONTEXT / 2 + BLOCK)
    return {
        "projections": LAYERS * 3 * (slots * queries + (slots + CONTEXT) * key_values)
        + 4 * CONTEXT * TAPS * HIDDEN * HIDDEN,
        "attention": attention,
        "head": 4 * num_anchors * (BLOCK - 1) * HIDDEN * vocab,
    }


def measure(who: str, vocab: int, num_anchors: int, peers: Path) -> dict[str, float]:
    """`work` in a process of its own."""
    path = os.pathsep.join([str(peers / who), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, __file__, "--work", who, str(vocab), str(num_anchors)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        sys.exit(f"{who} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(peers: Path) -> None:
    """Measures every case and prints table and ratios."""
    there = [who for who in ("specforge", "speculators") if (peers / who).is_dir()]
    print(f"T {CONTEXT}, blocks of {BLOCK}, hidden {HIDDEN}, {LAYERS} layers, float32, 1 thread, best of {ROUNDS}")
    rows: list[dict[str, Any]] = []
    for vocab, num_anchors in CASES + OURS_ALONE:
        names = ["ours", *(there if (vocab, num_anchors) in CASES else [])]
        found = {who: measure(who, vocab, num_anchors, peers) for who in names}
        mine = found["ours"]
        if "specforge" in found and abs(found["specforge"]["loss"] - mine["loss"]) > 1e-4 * mine["loss"]:
            sys.exit(f"not the same step: our loss {mine['loss']}, SpecForge's {found['specforge']['loss']}")
        for who, one in found.items():
            times, memory = one["cpu_s"] / mine["cpu_s"], one["peak_bytes"] / mine["peak_bytes"]
            print(
                f"  V {vocab:>6} anchors {num_anchors:>5} {who:<12}{one['cpu_s']:>7.2f} cpu-s {times:>5.2f} x ours"
                f"{one['peak_bytes'] / 1e9:>7.2f} GB {memory:>5.2f} x ours   loss {one['loss']:.5f}"
            )
            rows.append({"who": who, "vocab": vocab, "anchors": num_anchors, **one})
        done = flop(vocab, num_anchors)
        total, shares = sum(done.values()), {part: round(n / sum(done.values()), 2) for part, n in done.items()}
        achieved = total / mine["cpu_s"] / mine["peak_flop_per_s"]
        print(
            f"    ours: {total / 1e9:.0f} GFLOP {shares}, {100 * achieved:.0f} % of the matrix-multiply peak, "
            f"{1e6 * mine['cpu_s'] / num_anchors / BLOCK:.0f} us and {mine['peak_bytes'] / num_anchors / 1e3:.0f} kB "
            f"peak: per block position, per anchor"
        )
    print(json.dumps({"bench": "train", "rows": rows}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        print(json.dumps(work(sys.argv[2], *map(int, sys.argv[3:]))))
    else:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "peers"))
