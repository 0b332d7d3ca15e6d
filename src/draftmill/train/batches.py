"""One micro-batch: the target's features and the blocks of a training row, as a pure function of the planned row.

On the target's side every document is a row of its own, right-padded, together with others of about its length (hybrid
targets leak state between packed documents). On the drafter's side the row's documents are packed end to end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftmill.extract.taps import Extractor
from draftmill.model.mask import BlockLayout
from draftmill.model.shape import DrafterShape
from draftmill.train.anchors import draw_anchors
from draftmill.train.rows import PlannedRow
from draftmill.train.samples import BoolArray, IntArray, Sample, SampleSet

# Padding costs the target as much as text: a batch holds samples of at most this ratio of lengths.
MAX_LENGTH_RATIO = 1.25


@dataclass(frozen=True)
class DocumentStates:
    """What was read of one document, a row a token."""

    features_TF: Float[Tensor, "T KH"]
    last_TH: Float[Tensor, "T H"] | None = None


@runtime_checkable
class FeatureSource(Protocol):
    """Where a document's hidden states come from: the target, or a test."""

    def states_of(self, samples: Sequence[Sample]) -> list[DocumentStates]:
        """What was read of every sample, in order."""
        ...


@dataclass(frozen=True)
class Batch:
    """The documents of one training row, packed, with their blocks; J = B - 1 drafted slots, P supervised ones."""

    features_TF: Float[Tensor, "T KH"]
    block_ids_NB: Int[Tensor, "N B"]
    layout: BlockLayout
    labels_NJ: Int[Tensor, "N J"]
    supervised_NJ: Bool[Tensor, "N J"]
    last_PH: Float[Tensor, "P H"] | None = None
    """What the target says each supervised slot's token from: its last layer's output, before the final norm."""


class Batches:
    """Makes the batch of a planned row."""

    def __init__(self, samples: SampleSet, source: FeatureSource, shape: DrafterShape, seed: int) -> None:
        self._samples = samples
        self._source = source
        self._shape = shape
        self._seed = seed

    def batch_at(self, row: PlannedRow) -> Batch:
        """Features, blocks, labels and who sees whom; the same for the same row, whatever came before."""
        documents = [self._samples[index] for index in row.samples]
        anchors = [
            draw_anchors(doc.loss_mask, count, seed=self._seed, epoch=row.epoch, sample_id=doc.id, draw=0)
            for doc, count in zip(documents, row.counts, strict=True)
        ]
        states = self._source.states_of(documents)
        return pack(documents, states, anchors, self._shape.block_size, self._shape.mask_id)


def pack(
    documents: Sequence[Sample],
    states: Sequence[DocumentStates],
    anchors: Sequence[IntArray],
    block_size: int,
    mask_id: int,
) -> Batch:
    """Documents laid end to end: positions restart, anchors become row indices, labels are the text's own tokens."""
    device = states[0].features_TF.device
    lengths = [len(doc.input_ids) for doc in documents]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    ids_T = _to(np.concatenate([doc.input_ids for doc in documents]), device)
    run_end_T = _to(np.concatenate([run_ends(d.loss_mask) + s for d, s in zip(documents, starts, strict=True)]), device)
    layout = BlockLayout(
        anchors_N=_to(np.concatenate([a + s for a, s in zip(anchors, starts, strict=True)]), device),
        documents_T=_to(np.repeat(np.arange(len(documents)), lengths), device),
        positions_T=_to(np.concatenate([np.arange(length) for length in lengths]), device),
        block_size=block_size,
    )
    drafted_NJ = layout.slots_NB[:, 1:]
    supervised_NJ = drafted_NJ < run_end_T[layout.anchors_N, None]
    block_ids_NB = torch.full_like(layout.slots_NB, mask_id)
    block_ids_NB[:, 0] = ids_T[layout.anchors_N]
    labels_NJ = ids_T[drafted_NJ.clamp(max=len(ids_T) - 1)]
    features_TF = torch.cat([read.features_TF for read in states])
    lasts = [read.last_TH for read in states if read.last_TH is not None]
    # The state at a + i - 1 is what the target says the token of slot i from.
    last_PH = torch.cat(lasts)[drafted_NJ[supervised_NJ] - 1] if lasts else None
    return Batch(features_TF, block_ids_NB, layout, labels_NJ, supervised_NJ, last_PH)


def run_ends(loss_mask: BoolArray) -> IntArray:
    """For every position of one document, where the supervised run that holds it ends; unsupervised ones: itself."""
    stops = np.flatnonzero(np.append(~loss_mask, True))
    return stops[np.searchsorted(stops, np.arange(len(loss_mask)))]


def _to(array: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device)


class TargetFeatures:
    """Hidden states from the frozen target, a few documents of about the same length at a time.

    With `cache_bytes` what was read of a visited sample stays in memory while it fits. Then every document goes through
    the target alone: padding and company change the last bits, and a rerun that recomputes must find the same ones.
    """

    def __init__(self, extractor: Extractor, device: torch.device, *, max_tokens: int, cache_bytes: int) -> None:
        self._extractor = extractor
        self._device = device
        self._max_tokens = max_tokens
        self._bytes_left = cache_bytes
        self._is_caching = cache_bytes > 0
        self._cached: dict[str, DocumentStates] = {}

    def states_of(self, samples: Sequence[Sample]) -> list[DocumentStates]:
        """What is read of every sample, in order, on the device that trains."""
        if self._is_caching:
            return [self._cached_or_read(sample) for sample in samples]
        found: dict[int, DocumentStates] = {}
        for bucket in length_buckets([len(s.input_ids) for s in samples], self._max_tokens):
            found |= zip(bucket, self._read([samples[i] for i in bucket]), strict=True)
        return [found[i] for i in range(len(samples))]

    def _cached_or_read(self, sample: Sample) -> DocumentStates:
        if sample.id in self._cached:
            return self._cached[sample.id]
        states = self._read([sample])[0]
        num_bytes = states.features_TF.nbytes + (0 if states.last_TH is None else states.last_TH.nbytes)
        if num_bytes <= self._bytes_left:
            self._bytes_left -= num_bytes
            self._cached[sample.id] = states
        return states

    def _read(self, samples: Sequence[Sample]) -> list[DocumentStates]:
        lengths = torch.tensor([len(sample.input_ids) for sample in samples])
        ids_RT = torch.zeros(len(samples), int(lengths.max()), dtype=torch.long)
        for row, sample in zip(ids_RT, samples, strict=True):
            row[: len(sample.input_ids)] = torch.from_numpy(sample.input_ids.astype(np.int64))
        read = self._extractor.read_states(ids_RT.to(self._device), lengths.to(self._device))
        lasts = [None] * len(samples) if read.last_RTH is None else read.last_RTH
        return [
            DocumentStates(features[:length], None if last is None else last[:length])
            for features, last, length in zip(read.features_RTF, lasts, lengths.tolist(), strict=True)
        ]


def length_buckets(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices grouped for the target, shortest first: at most `max_tokens` padded tokens and little padding each."""
    buckets: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        bucket = buckets[-1] if buckets else []
        fits = (len(bucket) + 1) * lengths[i] <= max_tokens
        if bucket and fits and lengths[i] <= MAX_LENGTH_RATIO * lengths[bucket[0]]:
            bucket.append(i)
        else:
            buckets.append([i])
    return buckets
