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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from draftmill.contracts.errors import RecipeError
from draftmill.settings.train import MOST_STEPS, TrainSettings
from draftmill.storage.waiting import nothing
from draftmill.train.anchors import anchor_count, permutation
from draftmill.train.gate import KeptSample

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

    def num_steps(self, num_epochs: int) -> int:
        """Steps in which every sample is visited `num_epochs` times; the last ones may begin another pass."""
        num_stretches = self._num_parts + num_epochs - 1
        for stretch in range(num_stretches):
            self._rows(stretch)
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
            self._packed[stretch] = list(self._pack(stretch))
        if stretch + 1 == len(self._starts):
            self._starts.append(self._starts[stretch] + len(self._packed[stretch]))
        return self._packed[stretch]

    def _members(self, stretch: int) -> Iterator[KeptSample]:
        """The samples of a stretch, in the order in which they are visited."""
        if stretch < self._num_parts:
            kept = self._kept_of(stretch)
            key = ["order", self._seed, 0, *([stretch] if stretch else [])]
        else:
            self._before_second()
            kept = [sample for part in range(self._num_parts) for sample in self._kept_of(part)]
            key = ["order", self._seed, self._epoch(stretch)]
            assert kept, "the gate refuses a set that leaves nothing"
        return (kept[i] for i in permutation(len(kept), *key))

    def _epoch(self, stretch: int) -> int:
        return max(0, stretch - self._num_parts + 1)

    def _pack(self, stretch: int) -> Iterator[PlannedRow]:
        samples: list[KeptSample] = []
        counts: list[int] = []
        tokens = 0
        for sample in self._members(stretch):
            count = anchor_count(sample.num_eligible, sample.length, self._num_anchors, self._max_tokens)
            if samples and (tokens + sample.length > self._max_tokens or sum(counts) + count > self._num_anchors):
                yield self._planned(stretch, samples, counts)
                samples, counts, tokens = [], [], 0
            samples.append(sample)
            counts.append(count)
            tokens += sample.length
        if samples:
            yield self._planned(stretch, samples, counts)

    def _planned(self, stretch: int, samples: Sequence[KeptSample], counts: Sequence[int]) -> PlannedRow:
        indices, lengths = tuple(s.index for s in samples), tuple(s.length for s in samples)
        return PlannedRow(self._epoch(stretch), indices, lengths, tuple(counts))
