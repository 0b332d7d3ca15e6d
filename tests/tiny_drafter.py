"""Tiny drafters for a tiny target: random, or trained on one answer until it knows it by heart."""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from draftmill.extract.taps import TapReader
from draftmill.extract.target import Target
from draftmill.model.attention import DenseAttention
from draftmill.model.drafter import Drafter
from draftmill.model.mask import one_document
from draftmill.model.shape import FULL, SLIDING, DrafterShape

MASK_ID = 265


def tiny_shape(target: Target, *, block_size: int = 4, num_layers: int = 2, window: int | None = None) -> DrafterShape:
    """A drafter of the target's width with two taps; with `window` its first layer slides."""
    return DrafterShape(
        hidden_size=target.hidden_size,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        max_positions=512,
        vocab_size=target.vocab_size,
        block_size=block_size,
        tap_ids=(1, 3),
        mask_id=MASK_ID,
        num_target_layers=target.num_layers,
        layer_types=(FULL if window is None else SLIDING, *[FULL] * (num_layers - 1)),
        sliding_window=window,
    )


def random_drafter(shape: DrafterShape, seed: int = 0) -> Drafter:
    """A drafter whose drafts depend on everything it reads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(shape)
        for name, weight in drafter.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            else:
                torch.nn.init.normal_(weight, std=0.2)
    return drafter.eval()


def overfit_drafter(
    target: Target, shape: DrafterShape, prompt_ids: Sequence[int], answer_ids: Sequence[int], num_steps: int = 40
) -> Drafter:
    """A drafter trained on every anchor of one answer, in the training layout, until it drafts it in full blocks."""
    drafter = random_drafter(shape).train()
    ids_T = torch.tensor([*prompt_ids, *answer_ids])
    features_TF = TapReader(target, shape.tap_ids).read(ids_T[None], torch.tensor([len(ids_T)]))[0]
    anchors_N = torch.arange(len(prompt_ids), len(ids_T) - 1)
    layout = one_document(anchors_N, len(ids_T), shape.block_size)
    block_ids_NB = torch.full((len(anchors_N), shape.block_size), shape.mask_id)
    block_ids_NB[:, 0] = ids_T[anchors_N]
    embeds_QH = target.embed(block_ids_NB.flatten()).detach()
    slots_NB = layout.slots_NB
    is_learnt_NB = (slots_NB < len(ids_T)) & (torch.arange(shape.block_size) > 0)
    labels = ids_T[slots_NB[is_learnt_NB]]
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(num_steps):
        hidden_QH = drafter(embeds_QH, drafter.project(features_TF), layout, DenseAttention(layout))
        F.cross_entropy(target.head(hidden_QH[is_learnt_NB.flatten()]), labels).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()
