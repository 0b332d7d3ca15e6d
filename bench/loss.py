"""The loss through a large frozen head: our tiles with the gradient formed on the way, against two plain ways.

Same slots, same head, float32, one thread, interleaved rounds; CPU-seconds of forward and backward, and the largest
gradient difference from full logits. `python bench/loss.py [slots] [vocabulary rows]`
"""

import json
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from draftmill.model.vocabulary import TILE_LOGITS_WHOLE, Objective, head_costs, tile_of

HIDDEN = 576
ROUNDS = 5
HARD = Objective(hard=1.0, kl=0.0, tv=0.0)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def full_logits(hidden_PH: Tensor, labels_P: Tensor, head_VH: Tensor) -> Tensor:
    return F.cross_entropy(hidden_PH @ head_VH.T, labels_P, reduction="sum")


def recomputed_chunks(hidden_PH: Tensor, labels_P: Tensor, head_VH: Tensor) -> Tensor:
    size = max(1, TILE_LOGITS_WHOLE // len(head_VH))
    pairs = zip(hidden_PH.split(size), labels_P.split(size), strict=True)
    parts = [checkpoint(full_logits, hidden, labels, head_VH, use_reentrant=False) for hidden, labels in pairs]
    return torch.stack([part for part in parts if isinstance(part, Tensor)]).sum()


def ours(hidden_PH: Tensor, labels_P: Tensor, head_VH: Tensor) -> Tensor:
    return head_costs(hidden_PH, labels_P, None, head_VH, HARD, tile_of(head_VH, HARD)).cost_P.sum()


def spend(loss: Loss, hidden_PH: Tensor, labels_P: Tensor, head_VH: Tensor) -> tuple[float, Tensor]:
    """CPU-seconds of forward and backward, and the gradient."""
    leaf = hidden_PH.clone().requires_grad_()
    start = time.process_time()
    loss(leaf, labels_P, head_VH).backward()
    assert leaf.grad is not None
    return time.process_time() - start, leaf.grad


def main(num_slots: int = 336, vocab_size: int = 49_152) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = (
        torch.randn(num_slots, HIDDEN),
        torch.randint(vocab_size, (num_slots,)),
        torch.randn(vocab_size, HIDDEN) / 24,
    )
    ways: dict[str, Loss] = {"full logits": full_logits, "recomputed chunks": recomputed_chunks, "ours": ours}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gradients: dict[str, Tensor] = {}
    for _ in range(ROUNDS):
        for name, loss in ways.items():
            spent, gradients[name] = spend(loss, *inputs)
            seconds[name].append(spent)
    middle = {name: median(spent) for name, spent in seconds.items()}
    print(f"{num_slots} slots of {HIDDEN} over {vocab_size} rows, float32, 1 thread, median of {ROUNDS} rounds")
    for name in ways:
        error = float((gradients[name] - gradients["full logits"]).abs().max())
        ratio = middle[name] / middle["ours"]
        print(f"  {name:<20}{middle[name]:>8.2f} cpu-s {ratio:>6.2f} x ours   gradient differs by {error:.1e}")
    print(json.dumps({"bench": "loss", "cpu_s": middle, "full_over_ours": middle["full logits"] / middle["ours"]}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
