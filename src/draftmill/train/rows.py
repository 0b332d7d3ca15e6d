"""Which samples share a training row, and which rows make a step: functions of (seed, epoch, kept samples) alone.

    stretch     0        1        …   P-1      P        P+1      …
    holds       part 0   part 1   …   part P-1 all      all      …
    epoch       0        0        …   0        1        2        …

An epoch visits every kept sample once: the first one part after part in the plan's order, so that it can begin before
the last parts are made, the others all over the set. Within a stretch samples stand in the order of a keyed
permutation, and join a row until the next one would take it over `max_tokens` tokens or `num_anchors` anchors, so that
no draw is ever cut. Rows of successive stretches form one stream; a group of `rows_per_step` of it makes
`draws_per_pass` successive steps, each with anchors of its own.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from draftmill.contracts.errors import RecipeError
from draftmill.settings.train import MOST_STEPS, TrainSettings
from draftmill.storage.waiting import nothing
from draftmill.train.anchors import anchor_counts, permutation
from draftmill.train.gate import KeptSample
from draftmill.train.samples import IntArray

log = logging.getLogger(__name__)

# So many rows are counted within seconds.
_COUNTED_AT_ONCE = 1_000_000


@dataclass(frozen=True)
class PlannedRow:
    """One micro-batch: samples by their index in the set, visited in `epoch`, with the anchors each one gets."""

    epoch: int
    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    """Tokens of each sample that are trained on."""
    counts: tuple[int, ...]
    draw: int = 0
    """Which draw of anchors of this visit."""
    index: int = 0
    """Its number in the stream of rows over all epochs: what says which ranks it belongs to."""


class RowPlan:
    """The stream of training rows over all epochs; stretches are packed when they are reached."""

    def __init__(
        self,
        num_parts: int,
        kept_of: Callable[[int], Sequence[KeptSample]],
        settings: TrainSettings,
        before_second: Callable[[], None] = nothing,
    ) -> None:
        """`kept_of` says what is trained on of a part, and may wait for it; `before_second` is called before samples
        are drawn from all of them."""
        self._num_parts = num_parts
        self._kept_of = kept_of
        self._before_second = before_second
        self._seed = settings.seed
        self._max_tokens = settings.max_tokens
        self._num_anchors = settings.num_anchors
        self._rows_per_step = settings.rows_per_step
        self._draws = settings.draws_per_pass
        self._starts = [0]
        self._packed: dict[int, list[PlannedRow]] = {}
        self._all: Visits | None = None
        """The samples of all parts, once they are known."""

    def num_steps(self, num_epochs: int) -> int:
        """Steps in which every sample is visited `num_epochs` times; the last ones may begin another pass."""
        num_stretches = self._num_parts + num_epochs - 1
        for stretch in range(len(self._starts) - 1, num_stretches):  # counted, not packed: that takes long
            self._count(stretch, len(self._visits(stretch).row_ends(self._max_tokens, self._num_anchors)))
            if stretch + 1 == self._num_parts:
                self._foretell(num_epochs)
        return self._draws * -(-self._starts[num_stretches] // self._rows_per_step)

    def _foretell(self, num_epochs: int) -> None:
        """RecipeError where the rows of the first epoch promise more steps than a run may have."""
        about = self._draws * self._starts[-1] * num_epochs // self._rows_per_step
        if about > MOST_STEPS:
            raise RecipeError(
                f"--num-epochs {num_epochs:,} would take about {about:,} steps, and a run has {MOST_STEPS:,} at most: "
                "lower it, or set --num-steps"
            )
        if self._starts[-1] * num_epochs > _COUNTED_AT_ONCE:
            log.info("counting the rows of --num-epochs %s first; --num-steps needs no counting", f"{num_epochs:,}")

    def micros_of(self, step: int) -> list[PlannedRow]:
        """The rows of step `step`, counted from 0."""
        group, draw = divmod(step, self._draws)
        first = group * self._rows_per_step
        return [
            replace(self._row(index), draw=draw, index=index) for index in range(first, first + self._rows_per_step)
        ]

    def is_known(self, step: int) -> bool:
        """Whether the rows of step `step` are planned already, so that asking for them waits for no part."""
        return (step // self._draws + 1) * self._rows_per_step <= self._starts[-1]

    def parts_reached(self, num_steps: int) -> int:
        """How many parts the first `num_steps` steps read from."""
        last = (num_steps - 1) // self._draws * self._rows_per_step + self._rows_per_step - 1
        return min(self._stretch_of(last) + 1, self._num_parts)

    def _row(self, index: int) -> PlannedRow:
        stretch = self._stretch_of(index)
        return self._rows(stretch)[index - self._starts[stretch]]

    def _stretch_of(self, index: int) -> int:
        stretch = bisect_right(self._starts, index) - 1
        while stretch + 1 == len(self._starts) and index - self._starts[stretch] >= len(self._rows(stretch)):
            stretch += 1
        return stretch

    def _rows(self, stretch: int) -> list[PlannedRow]:
        if stretch not in self._packed:  # at a border who looks ahead stands in two
            self._packed = {s: rows for s, rows in self._packed.items() if abs(s - stretch) == 1}
            self._packed[stretch] = self._pack(stretch)
        self._count(stretch, len(self._packed[stretch]))
        return self._packed[stretch]

    def _count(self, stretch: int, num_rows: int) -> None:
        if stretch + 1 == len(self._starts):
            self._starts.append(self._starts[stretch] + num_rows)

    def _visits(self, stretch: int) -> "Visits":
        """The samples of a stretch, in the order in which they are visited."""
        if stretch < self._num_parts:
            found = self._visits_of(self._kept_of(stretch))
            key = ["order", self._seed, 0, *([stretch] if stretch else [])]
        else:
            if self._all is None:
                self._before_second()
                kept = [sample for part in range(self._num_parts) for sample in self._kept_of(part)]
                assert kept, "the gate refuses a set that leaves nothing"
                self._all = self._visits_of(kept)
            found, key = self._all, ["order", self._seed, self._epoch(stretch)]
        return found.in_order(permutation(len(found.indices), *key))

    def _visits_of(self, kept: Sequence[KeptSample]) -> "Visits":
        figures = np.array([(s.index, s.length, s.num_eligible) for s in kept], dtype=np.int64).reshape(-1, 3)
        indices, lengths, eligible = figures.T
        return Visits(indices, lengths, anchor_counts(eligible, lengths, self._num_anchors, self._max_tokens))

    def _epoch(self, stretch: int) -> int:
        return max(0, stretch - self._num_parts + 1)

    def _pack(self, stretch: int) -> list[PlannedRow]:
        visits, epoch = self._visits(stretch), self._epoch(stretch)
        indices, lengths, counts = visits.indices.tolist(), visits.lengths.tolist(), visits.counts.tolist()
        ends = visits.row_ends(self._max_tokens, self._num_anchors)
        return [
            PlannedRow(epoch, tuple(indices[a:b]), tuple(lengths[a:b]), tuple(counts[a:b]))
            for a, b in zip([0, *ends], ends, strict=False)
        ]


@dataclass(frozen=True)
class Visits:
    """Samples in some order: index in the set, tokens that are trained on, and anchors of one draw."""

    indices: IntArray
    lengths: IntArray
    counts: IntArray

    def in_order(self, order: IntArray) -> "Visits":
        """The same samples in another order."""
        return Visits(self.indices[order], self.lengths[order], self.counts[order])

    def row_ends(self, max_tokens: int, num_anchors: int) -> list[int]:
        """Behind which sample each row ends, when each takes samples as long as both limits allow (and one at least).

        For every sample it is looked up how far a row would reach that began there; then rows follow one another.
        """
        reach = np.minimum(_reach(self.lengths, max_tokens), _reach(self.counts, num_anchors))
        reach = np.maximum(reach, np.arange(1, len(reach) + 1)).tolist()
        ends, end = [], 0
        while end < len(reach):
            end = reach[end]
            ends.append(end)
        return ends


def _reach(sizes: IntArray, limit: int) -> IntArray:
    """For every place, up to which place (not included) the sizes from there on stay within the limit."""
    totals = np.cumsum(sizes)
    return np.searchsorted(totals, totals - sizes + limit, side="right")
