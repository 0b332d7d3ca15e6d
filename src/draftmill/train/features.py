"""What the target says of documents: hidden states, read a few documents of about the same length at a time.

Every document is handed over as a row of its own, right-padded, for hybrid targets leak state between packed ones; an
extractor that packs them all the same has proven that its target does not (`extract/packing.py`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from draftmill.extract.taps import Extractor
from draftmill.train.clock import wait_for
from draftmill.train.samples import Sample

# Padding costs the target as much as text: at most this share of a target batch's tokens.
MAX_PADDING_FRAC = 0.05


@dataclass(frozen=True)
class DocumentStates:
    """What was read of one document, a row a token."""

    features_TF: Float[Tensor, "T KH"]
    last_TH: Float[Tensor, "T H"] | None = None


@dataclass(frozen=True)
class Toll:
    """What it cost to come by the states of a row."""

    target_s: float = 0.0
    """Seconds some target was at work."""
    waiting_s: float = 0.0
    """Seconds this rank had nothing to do but wait for them."""
    held_s: float = 0.0
    """Seconds the target had nothing to do but wait for room to put them."""
    in_flight_bytes: int = 0
    """Bytes on their way to all drafters when these were sent, themselves included."""
    span_s: float = 0.0
    """Seconds of a target rank with a clock of its own from the row before to this one, whatever it did in them."""


FREE = Toll()


@dataclass(frozen=True)
class RowStates:
    """What was read of the documents of one row, in their order."""

    documents: list[DocumentStates]
    toll: Toll


@runtime_checkable
class FeatureSource(Protocol):
    """Where a document's hidden states come from: the target, or a test."""

    def states_of(self, samples: Sequence[Sample]) -> list[DocumentStates]:
        """What was read of every sample, in order."""
        ...


@runtime_checkable
class RowSource(Protocol):
    """Where the states of this rank's rows come from: its own target, or a target rank."""

    def read(self, documents: Sequence[Sample]) -> RowStates:
        """The states of the next row."""
        ...


@dataclass(frozen=True)
class OwnTarget:
    """Rows read by the target that this rank holds itself."""

    features: FeatureSource

    def read(self, documents: Sequence[Sample]) -> RowStates:
        """The states of a row, any row."""
        start = time.perf_counter()
        states = self.features.states_of(documents)
        wait_for(states[0].features_TF.device)
        return RowStates(states, Toll(target_s=time.perf_counter() - start))


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
