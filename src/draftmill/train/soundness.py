"""Features as they are learnt from: finite, and noised where a recipe asks for it.

A sample whose features are not finite (an overflow of the target's own dtype, a broken transfer) would make every
weight of the drafter NaN in one step. It is left out of the loss, named, and counted; the run ends after too many.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftmill.train.anchors import keyed_number
from draftmill.train.features import DocumentStates


def poisoned(states: Sequence[DocumentStates]) -> list[int]:
    """Which documents have states that are not finite, by their place in the row; asks the device once."""
    is_sound = [read.features_TF.isfinite().all() for read in states]
    for i, read in enumerate(states):
        if read.last_TH is not None:
            is_sound[i] = is_sound[i] & read.last_TH.isfinite().all()
    return [i for i, sound in enumerate(torch.stack(is_sound).tolist()) if not sound]


def blanked(states: Sequence[DocumentStates], documents: Sequence[int]) -> list[DocumentStates]:
    """The states with zeros in place of some documents': a NaN would spread through sums that weigh it with 0."""
    return [_zeros(read) if i in documents else read for i, read in enumerate(states)]


def _zeros(read: DocumentStates) -> DocumentStates:
    last_TH = None if read.last_TH is None else torch.zeros_like(read.last_TH)
    return DocumentStates(torch.zeros_like(read.features_TF), last_TH)


def noised(read: DocumentStates, noise: float, *key: str | int) -> DocumentStates:
    """The document's features with Gaussian noise of `noise` times their root mean square; the same for the same key.

    What the target itself says (`last_TH`) stays as it is.
    """
    features_TF = read.features_TF
    generator = torch.Generator(features_TF.device).manual_seed(keyed_number(8, *key) >> 1)
    drawn_TF = torch.empty_like(features_TF).normal_(generator=generator)
    return DocumentStates(features_TF + noise * _root_mean_square(features_TF) * drawn_TF, read.last_TH)


def _root_mean_square(features_TF: Tensor) -> Tensor:
    return features_TF.float().square().mean().sqrt().to(features_TF.dtype)
