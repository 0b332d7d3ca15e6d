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
from torch.nn import functional as F

from draftmill.contracts.blocks import PADDING_ANCHOR
from draftmill.extract.taps import Extractor
from draftmill.model.mask import BlockLayout
from draftmill.model.shape import DrafterShape
from draftmill.settings.train import TrainSettings
from draftmill.train.anchors import draw_anchors
from draftmill.train.rows import PlannedRow
from draftmill.train.samples import BoolArray, IntArray, Sample, SampleSet

# Padding costs the target as much as text: at most this share of a target batch's tokens.
MAX_PADDING_FRAC = 0.05
# Rows and blocks that only fill a batch up belong to no document.
NO_DOCUMENT = -1


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


@dataclass(frozen=True)
class BatchSize:
    """What a training row may hold, and how much of the target's work is kept for further draws."""

    max_tokens: int
    num_anchors: int
    is_constant: bool
    """Whether every batch is filled up to `max_tokens` tokens and `num_anchors` blocks."""
    num_kept_rows: int
    """Rows whose hidden states are kept, newest first: those that another draw will read."""

    @staticmethod
    def of(settings: TrainSettings, *, is_constant: bool) -> "BatchSize":
        """The sizes that settings ask for."""
        num_kept = settings.rows_per_step if settings.draws_per_pass > 1 else 0
        return BatchSize(settings.max_tokens, settings.num_anchors, is_constant, num_kept)


class Batches:
    """Makes the batch of a planned row."""

    def __init__(self, samples: SampleSet, source: FeatureSource, shape: DrafterShape, seed: int, size: BatchSize):
        self._samples = samples
        self._source = source
        self._shape = shape
        self._seed = seed
        self._size = size
        self._kept: dict[tuple[int, tuple[int, ...]], list[DocumentStates]] = {}

    def batch_at(self, row: PlannedRow) -> Batch:
        """Features, blocks, labels and who sees whom; the same for the same row, whatever came before."""
        documents = [self._samples[index].cut(self._size.max_tokens) for index in row.samples]
        anchors = [
            draw_anchors(doc.loss_mask, count, seed=self._seed, epoch=row.epoch, sample_id=doc.id, draw=row.draw)
            for doc, count in zip(documents, row.counts, strict=True)
        ]
        packed = pack(documents, anchors, self._shape.block_size)
        batch = packed.filled(self._size) if self._size.is_constant else packed
        return batch.with_states(self._states_of(row, documents), self._shape.mask_id)

    def _states_of(self, row: PlannedRow, documents: Sequence[Sample]) -> list[DocumentStates]:
        """What the target says of the row; asked once for all draws of a visit."""
        key = (row.epoch, row.samples)
        if key not in self._kept:
            if self._size.num_kept_rows == 0:
                return self._source.states_of(documents)
            while len(self._kept) >= self._size.num_kept_rows:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = self._source.states_of(documents)
        return self._kept[key]


@dataclass(frozen=True)
class Packed:
    """Documents laid end to end with their blocks, before the target has read them."""

    ids_T: Int[Tensor, "T"]
    run_end_T: Int[Tensor, "T"]
    """Where the supervised run that holds each token ends."""
    layout: BlockLayout

    def filled(self, size: BatchSize) -> "Packed":
        """The same, filled up to constant shapes: tokens of no document, which nobody sees, and blocks of no anchor."""
        num_tokens = size.max_tokens - len(self.ids_T)
        num_blocks = size.num_anchors - self.layout.num_blocks
        assert num_tokens >= 0 and num_blocks >= 0, "rows are planned within max_tokens and num_anchors"
        layout = BlockLayout(
            anchors_N=F.pad(self.layout.anchors_N, (0, num_blocks), value=PADDING_ANCHOR),
            documents_T=F.pad(self.layout.documents_T, (0, num_tokens), value=NO_DOCUMENT),
            positions_T=F.pad(self.layout.positions_T, (0, num_tokens)),
            block_size=self.layout.block_size,
        )
        return Packed(F.pad(self.ids_T, (0, num_tokens)), F.pad(self.run_end_T, (0, num_tokens)), layout)

    def with_states(self, states: Sequence[DocumentStates], mask_id: int) -> Batch:
        """The batch: labels are the text's own tokens; features of filled-up tokens are zero."""
        device = states[0].features_TF.device
        layout, ids_T, run_end_T = self.layout.to(device), self.ids_T.to(device), self.run_end_T.to(device)
        is_real_N1 = layout.anchors_N[:, None] >= 0
        drafted_NJ = layout.slots_NB[:, 1:].clamp(max=len(ids_T) - 1)
        first_N = layout.anchors_N.clamp(min=0)
        supervised_NJ = is_real_N1 & (layout.slots_NB[:, 1:] < run_end_T[first_N, None])
        block_ids_NB = torch.full_like(layout.slots_NB, mask_id)
        block_ids_NB[:, 0] = torch.where(is_real_N1[:, 0], ids_T[first_N], mask_id)
        features_TF = torch.cat([read.features_TF for read in states])
        lasts = [read.last_TH for read in states if read.last_TH is not None]
        # The state at a + i - 1 is what the target says the token of slot i from.
        last_PH = torch.cat(lasts)[drafted_NJ[supervised_NJ] - 1] if lasts else None
        features_TF = F.pad(features_TF, (0, 0, 0, len(ids_T) - len(features_TF)))
        return Batch(features_TF, block_ids_NB, layout, ids_T[drafted_NJ], supervised_NJ, last_PH)


def pack(documents: Sequence[Sample], anchors: Sequence[IntArray], block_size: int) -> Packed:
    """Documents laid end to end: positions restart, anchors become row indices."""
    lengths = [len(doc.input_ids) for doc in documents]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    layout = BlockLayout(
        anchors_N=_to_tensor(np.concatenate([a + s for a, s in zip(anchors, starts, strict=True)])),
        documents_T=_to_tensor(np.repeat(np.arange(len(documents)), lengths)),
        positions_T=_to_tensor(np.concatenate([np.arange(length) for length in lengths])),
        block_size=block_size,
    )
    run_ends_T = np.concatenate([run_ends(d.loss_mask) + s for d, s in zip(documents, starts, strict=True)])
    return Packed(_to_tensor(np.concatenate([doc.input_ids for doc in documents])), _to_tensor(run_ends_T), layout)


def run_ends(loss_mask: BoolArray) -> IntArray:
    """For every position of one document, where the supervised run that holds it ends; unsupervised ones: itself."""
    stops = np.flatnonzero(np.append(~loss_mask, True))
    return stops[np.searchsorted(stops, np.arange(len(loss_mask)))]


def _to_tensor(array: IntArray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))


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
    """Indices grouped for the target, shortest first: at most `max_tokens` tokens with the padding, which is at most
    `MAX_PADDING_FRAC` of them."""
    buckets: list[list[int]] = []
    tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        padded = (len(buckets[-1]) + 1) * lengths[i] if buckets else 0
        tokens += lengths[i]
        if buckets and padded <= max_tokens and padded - tokens <= MAX_PADDING_FRAC * padded:
            buckets[-1].append(i)
        else:
            buckets.append([i])
            tokens = lengths[i]
    return buckets
