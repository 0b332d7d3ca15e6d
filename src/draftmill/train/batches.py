"""One micro-batch: the target's features and the blocks of a training row, as a pure function of the planned row.

Where the states come from is the source's (`features.py`). Here the row's documents are packed end to end.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from draftmill.contracts.blocks import PADDING_ANCHOR
from draftmill.model.mask import BlockLayout
from draftmill.model.shape import DrafterShape
from draftmill.settings.train import TrainSettings
from draftmill.train.anchors import draw_anchors
from draftmill.train.features import FREE, DocumentStates, RowSource, RowStates, Toll
from draftmill.train.rows import PlannedRow
from draftmill.train.samples import BoolArray, IntArray, Sample, SampleSet
from draftmill.train.soundness import blanked, noised, poisoned

# Rows and blocks that only fill a batch up belong to no document.
NO_DOCUMENT = -1


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
    poisoned: tuple[str, ...] = ()
    """Samples that nothing is learnt from, because their states are not finite."""
    toll: Toll = FREE
    """What it cost to come by its states."""


@dataclass(frozen=True)
class BatchRule:
    """What a training row may hold, how its features are noised, and what of the target's work is kept."""

    max_tokens: int
    num_anchors: int
    is_constant: bool
    """Whether every batch is filled up to `max_tokens` tokens and `num_anchors` blocks."""
    num_kept_rows: int
    """Rows whose hidden states are kept, the newest: as many as this rank has in a step, for their further draws."""
    feature_noise: float
    """Standard deviation of what is added to features, as a share of their root mean square."""

    @staticmethod
    def of(settings: TrainSettings, *, is_constant: bool, num_drafters: int) -> "BatchRule":
        """The rule that settings ask for, on one of so many drafter ranks, which the rows of a step are dealt to."""
        num_own = -(-settings.rows_per_step // num_drafters)
        num_kept = num_own if settings.draws_per_pass > 1 else 0
        # A row has no more anchors than tokens: memory for more would be filled up in vain.
        sizes = settings.max_tokens, min(settings.num_anchors, settings.max_tokens)
        return BatchRule(*sizes, is_constant, num_kept, settings.feature_noise)


class Batches:
    """Makes the batch of a planned row."""

    def __init__(self, samples: SampleSet, source: RowSource, shape: DrafterShape, seed: int, rule: BatchRule):
        self._samples = samples
        self._source = source
        self._shape = shape
        self._seed = seed
        self._rule = rule
        self._kept: dict[tuple[int, tuple[int, ...]], list[DocumentStates]] = {}

    def batch_at(self, row: PlannedRow) -> Batch:
        """Features, blocks, labels and who sees whom; the same for the same row, whatever came before."""
        documents = self._samples.documents(row.samples, row.lengths)
        read = self._states_of(row, documents)
        spoilt = poisoned(read.documents)
        packed = self._packed(row, documents).unsupervised(spoilt)
        states = blanked(read.documents, spoilt) if spoilt else read.documents
        if self._rule.feature_noise:
            states = self._noised(row, documents, states)
        batch = packed.with_states(states, self._shape.mask_id)
        return replace(batch, poisoned=tuple(documents[i].id for i in spoilt), toll=read.toll)

    def _packed(self, row: PlannedRow, documents: Sequence[Sample]) -> "Packed":
        anchors = [
            draw_anchors(doc.loss_mask, count, seed=self._seed, epoch=row.epoch, sample_id=doc.id, draw=row.draw)
            for doc, count in zip(documents, row.counts, strict=True)
        ]
        packed = pack(documents, anchors, self._shape.block_size)
        return packed.filled(self._rule) if self._rule.is_constant else packed

    def _states_of(self, row: PlannedRow, documents: Sequence[Sample]) -> RowStates:
        """What the target says of the row; asked once for all draws of a visit."""
        key = (row.epoch, row.samples)
        if key in self._kept:
            return RowStates(self._kept[key], FREE)
        read = self._source.read(documents)
        if self._rule.num_kept_rows:
            while len(self._kept) >= self._rule.num_kept_rows:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = read.documents
        return read

    def _noised(
        self, row: PlannedRow, documents: Sequence[Sample], states: Sequence[DocumentStates]
    ) -> list[DocumentStates]:
        noise, visit = self._rule.feature_noise, (self._seed, row.epoch, row.draw)
        pairs = zip(states, documents, strict=True)
        return [noised(read, noise, "noise", *visit, doc.id) for read, doc in pairs]


@dataclass(frozen=True)
class Packed:
    """Documents laid end to end with their blocks, before the target has read them."""

    ids_T: Int[Tensor, "T"]
    run_end_T: Int[Tensor, "T"]
    """Where the supervised run that holds each token ends."""
    layout: BlockLayout

    def filled(self, rule: BatchRule) -> "Packed":
        """The same, filled up to constant shapes: tokens of no document, which nobody sees, and blocks of no anchor."""
        num_tokens = rule.max_tokens - len(self.ids_T)
        num_blocks = rule.num_anchors - self.layout.num_blocks
        assert num_tokens >= 0 and num_blocks >= 0, "rows are planned within max_tokens and num_anchors"
        layout = BlockLayout(
            anchors_N=F.pad(self.layout.anchors_N, (0, num_blocks), value=PADDING_ANCHOR),
            documents_T=F.pad(self.layout.documents_T, (0, num_tokens), value=NO_DOCUMENT),
            positions_T=F.pad(self.layout.positions_T, (0, num_tokens)),
            block_size=self.layout.block_size,
        )
        return Packed(F.pad(self.ids_T, (0, num_tokens)), F.pad(self.run_end_T, (0, num_tokens)), layout)

    def unsupervised(self, documents: Collection[int]) -> "Packed":
        """The same, with nothing to be learnt from some of its documents."""
        if not documents:
            return self
        is_out_T = torch.isin(self.layout.documents_T, torch.tensor(sorted(documents)))
        return replace(self, run_end_T=self.run_end_T.masked_fill(is_out_T, 0))

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
