"""One training step of a drafter, forward and backward, as a process of its own: ours, or a peer's model class.

`python bench/train_peers.py [ours|specforge|speculators] [vocabulary rows] [anchors]` prints CPU-seconds (the best of
some rounds), how far the first one pushed the process's peak memory, and the loss. `train.py` sets peers beside ours.

Same weights, same fixed anchors, same labels, cross-entropy with decay, float32, one thread. What differs is said, not
hidden: speculators takes the target's most likely token for a label, for which it applies the head once more (its way
of working, so it counts), and skips a text's last block; both peers build a dense mask on a CPU.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CONTEXT, BLOCK, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, TAPS = 2_048, 16, 256, 2, 4, 2, 64, 512, 3
GAMMA, MASK_ID, ROUNDS = 7.0, 5, 3
PEAK_SIZE = 2_048

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


def drafter_shape(vocab: int) -> Any:
    """The drafter's shape as we say it."""
    from draftmill.model.shape import FULL, DrafterShape

    return DrafterShape(
        **{"hidden_size": HIDDEN, "num_layers": LAYERS, "num_heads": HEADS, "num_kv_heads": KV_HEADS},
        **{"head_dim": HEAD_DIM, "intermediate_size": WIDTH, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
        **{"max_positions": 4096, "vocab_size": vocab, "block_size": BLOCK, "tap_ids": (1, 3, 5), "mask_id": MASK_ID},
        **{"num_target_layers": 8, "layer_types": (FULL,) * LAYERS},
    )


def ours(vocab: int, num_anchors: int) -> tuple[nn.Module, Step]:
    """Our drafter, grouped attention, tiled loss."""
    from draftmill.model.drafter import Drafter
    from draftmill.model.grouped import GroupedAttention
    from draftmill.model.loss import LossRule, Truth, block_loss
    from draftmill.model.mask import one_document
    from draftmill.model.vocabulary import Objective

    drafter = Drafter(drafter_shape(vocab))
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


def qwen3_config(vocab: int, num_layers: int = LAYERS) -> Any:
    """The drafter's shape as transformers says it; with more layers, a small target's."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        **{"vocab_size": vocab, "hidden_size": HIDDEN, "num_hidden_layers": num_layers, "num_attention_heads": HEADS},
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


STEPS = {"ours": ours, "specforge": specforge, "speculators": speculators}


def measure(who: str, vocab: int, num_anchors: int) -> dict[str, float]:
    """CPU-seconds of a step, the memory it needs beside what was there, its loss, and this moment's peak."""
    torch.set_num_threads(1)
    module, step = STEPS[who](vocab, num_anchors)
    module.train()
    spent, peak, loss = [], 0, 0.0
    for round_ in range(ROUNDS):
        module.zero_grad(set_to_none=True)
        before = memory("VmRSS")
        forget_peak()
        start = time.process_time()
        mean = step()
        mean.backward()
        spent.append(time.process_time() - start)
        loss, peak = float(mean.detach()), peak if round_ else memory("VmHWM") - before
    return {"cpu_s": min(spent), "peak_bytes": peak, "loss": loss, "peak_flop_per_s": matmul_flop_per_s()}


def matmul_flop_per_s() -> float:
    """What a large float32 matrix product reaches here and now: the best of three."""
    left, right = torch.randn(PEAK_SIZE, PEAK_SIZE), torch.randn(PEAK_SIZE, PEAK_SIZE)
    spent = []
    for _ in range(3):
        start = time.process_time()
        left @ right
        spent.append(time.process_time() - start)
    return 2 * PEAK_SIZE**3 / min(spent)


def forget_peak() -> None:
    """Starts the peak anew from what is in use now (Linux: 5 in clear_refs, proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def memory(name: str) -> int:
    """A figure of /proc/self/status in bytes: VmRSS is in use, VmHWM was in use at the peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "ours"
    print(json.dumps(measure(chosen, *(map(int, sys.argv[2:]) if len(sys.argv) > 2 else (8_192, 64)))))
