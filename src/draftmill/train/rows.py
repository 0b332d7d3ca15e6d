"""Which samples share a training row, and which rows make a step: functions of (seed, epoch, kept samples) alone.

An epoch visits every kept sample once, in the order of a keyed permutation. Samples join a row until the next one
would take it over `max_tokens` tokens or `num_anchors` anchors, so that no draw is ever cut. Rows of successive epochs
form one stream; a group of `rows_per_step` of it makes `draws_per_pass` successive steps, each with anchors of its own.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from draftmill.settings.train import TrainSettings
from draftmill.train.anchors import anchor_count, permutation
from draftmill.train.gate import KeptSample


@dataclass(frozen=True)
class PlannedRow:
    """One micro-batch: samples by their index in the set, visited in `epoch`, with the anchors each one gets."""

    epoch: int
    samples: tuple[int, ...]
    counts: tuple[int, ...]
    draw: int = 0
    """Which draw of anchors of this visit."""
    index: int = 0
    """Its number in the stream of rows over all epochs: what says which ranks it belongs to."""


class RowPlan:
    """The stream of training rows over all epochs; epochs are packed when they are reached."""

    def __init__(self, kept: tuple[KeptSample, ...], settings: TrainSettings) -> None:
        self._kept = kept
        self._seed = settings.seed
        self._max_tokens = settings.max_tokens
        self._num_anchors = settings.num_anchors
        self._rows_per_step = settings.rows_per_step
        self._draws = settings.draws_per_pass
        self._starts = [0]
        self._packed: dict[int, list[PlannedRow]] = {}

    def num_steps(self, num_epochs: int) -> int:
        """Steps in which every sample is visited `num_epochs` times; the last ones may begin another pass."""
        for epoch in range(num_epochs):
            self._rows(epoch)
        return self._draws * -(-self._starts[num_epochs] // self._rows_per_step)

    def micros_of(self, step: int) -> list[PlannedRow]:
        """The rows of step `step`, counted from 0."""
        group, draw = divmod(step, self._draws)
        first = group * self._rows_per_step
        return [
            replace(self._row(index), draw=draw, index=index) for index in range(first, first + self._rows_per_step)
        ]

    def _row(self, index: int) -> PlannedRow:
        epoch = bisect_right(self._starts, index) - 1
        while index - self._starts[epoch] >= len(self._rows(epoch)):
            epoch += 1
        return self._rows(epoch)[index - self._starts[epoch]]

    def _rows(self, epoch: int) -> list[PlannedRow]:
        if epoch not in self._packed:  # at an epoch's border who looks ahead stands in two
            self._packed = {e: rows for e, rows in self._packed.items() if abs(e - epoch) == 1}
            self._packed[epoch] = list(self._pack(epoch))
        if epoch + 1 == len(self._starts):
            self._starts.append(self._starts[epoch] + len(self._packed[epoch]))
        return self._packed[epoch]

    def _pack(self, epoch: int) -> Iterator[PlannedRow]:
        samples: list[int] = []
        counts: list[int] = []
        tokens = 0
        for i in permutation(len(self._kept), "order", self._seed, epoch):
            sample = self._kept[i]
            count = anchor_count(sample.num_eligible, sample.length, self._num_anchors, self._max_tokens)
            if samples and (tokens + sample.length > self._max_tokens or sum(counts) + count > self._num_anchors):
                yield PlannedRow(epoch, tuple(samples), tuple(counts))
                samples, counts, tokens = [], [], 0
            samples.append(sample.index)
            counts.append(count)
            tokens += sample.length
        yield PlannedRow(epoch, tuple(samples), tuple(counts))
