"""Hidden states on their way from target ranks to drafter ranks, in placement split.

A row's states travel as one tensor, T tokens of K * H numbers each (and H more where the last layer is read too), and
after it four numbers on how it was come by. Both sides know from the plan which row comes next and how long it is, so
nothing is announced: no header, no tag, only order. A receive that a drafter rank has posted is the credit that lets
states cross. Neither side has more than `in_flight_bytes` of them under way, or one row's; each holds those of the row
that it is at work on besides, and a drafter rank those that further draws will read. While states cross the target
reads the next row: gloo moves them on a thread, NCCL on a stream of its own, from device to device, staged on no host.

On CUDA streams keep the order (as read in torch's `ProcessGroupNCCL.cpp`; not yet run on several GPUs):

* isend and irecv make NCCL's stream wait for what the current stream was told before: states are whole when they
  leave, and memory that is received into is no longer read. Nothing here works on any other stream.
* A parcel keeps its tensor until `arrive`, after which the current stream is behind NCCL's: the memory may then be used
  again without `record_stream`. With a timeout the caller itself waits too, so that what counts as under way is.
* The first message of a pair of ranks makes a communicator, for which each of the two waits for the other: `meet`.
* What is told of a row lies on the host and goes by gloo, in its own order; a parcel has arrived when both have.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch import distributed as dist

from draftmill.train.clock import Laps
from draftmill.train.features import DocumentStates, RowSource, RowStates, Toll
from draftmill.train.interruption import Stop
from draftmill.train.ranks import Ranks
from draftmill.train.rows import PlannedRow
from draftmill.train.samples import Sample, SampleSet

_NUM_TOLD = 4


@dataclass(frozen=True)
class Traffic:
    """Which rows' states cross from target to drafter ranks, in order, and what each one weighs."""

    micros_of: Callable[[int], list[PlannedRow]]
    is_known: Callable[[int], bool]
    """Whether the rows of a step may be asked for ahead: they are planned already, so that `micros_of` waits for no
    part, and nothing is to happen before."""
    first_step: int
    num_steps: int
    draws_per_pass: int
    width: int
    """Numbers a token."""
    dtype: torch.dtype

    def known_rows(self) -> Iterator[PlannedRow | None]:
        """Every row once a visit, at its first draw, or where the run goes on in the middle of its draws; None as long
        as the next one may not be asked for."""
        for step in self.visits():
            while not self.is_known(step):
                yield None
            yield from self.micros_of(step)

    def visits(self) -> Iterator[int]:
        """The steps, counted from 0, whose rows are read anew."""
        return (
            s for s in range(self.first_step, self.num_steps) if s % self.draws_per_pass == 0 or s == self.first_step
        )

    def num_tokens(self, row: PlannedRow) -> int:
        """Tokens of a row."""
        return sum(row.lengths)

    def num_bytes(self, row: PlannedRow) -> int:
        """Bytes of a row's states."""
        return self.num_tokens(row) * self.width * self.dtype.itemsize

    def check(self, row: PlannedRow, states_TW: Tensor) -> None:
        """AssertionError where a row's states are not what room is made for: who takes them would read other ones."""
        found, wanted = (*states_TW.shape, states_TW.dtype), (self.num_tokens(row), self.width, self.dtype)
        assert found == wanted, f"states of (tokens, numbers a token, dtype) {found} instead of {wanted}"


@dataclass(frozen=True)
class _Parcel:
    """States that are being sent or awaited, and what is told of them."""

    num_bytes: int
    states_TW: Tensor
    told: Tensor
    """float64: seconds the target was at work, seconds it was held, bytes it has on their way, seconds since it told of
    the row before."""
    works: tuple[Any, ...]

    @property
    def is_taken(self) -> bool:
        """Whether the other side has the states, as far as the backend tells: gloo does not before it is waited for."""
        return self.works[0].is_completed()

    def arrive(self, timeout: timedelta) -> None:
        """Waits until it is there, whichever backend moves it (with a timeout NCCL blocks its caller too)."""
        # What is told first: gloo notices at once that the other rank is gone, NCCL when its time is up.
        for work in reversed(self.works):
            work.wait(timeout)


def meet(ranks: Ranks) -> None:
    """Has every pair of ranks that states cross between pass one number on, all of them in one order.

    NCCL joins two ranks when they first talk, and neither goes on before the other has come. Left to the first states,
    a drafter that asks far ahead could wait for a target that waits for another drafter, which may be adding up
    gradients with the first: with three targets, two drafters and one row a step nobody would ever go on.
    """
    for target, drafter in ranks.layout.pairs():
        if ranks.rank in (target, drafter):
            ranks.greet(target, drafter)


class Outbox:
    """What a target rank has sent and nobody has taken yet."""

    def __init__(self, ranks: Ranks, traffic: Traffic, limit_bytes: int, timeout: timedelta) -> None:
        self._ranks = ranks
        self._traffic = traffic
        self._limit_bytes = limit_bytes
        self._timeout = timeout
        self._laps = Laps()
        self._under_way: deque[_Parcel] = deque()

    def send(self, row: PlannedRow, states_TW: Float[Tensor, "T W"], target_s: float) -> None:
        """Sends a row's states once there is room; returns while they are under way."""
        self._traffic.check(row, states_TW)
        to = self._ranks.layout.drafter_of(row)
        start = time.perf_counter()
        while self._under_way and self._under_way[0].is_taken:
            self._settle_oldest()
        while self._under_way and self._num_bytes() + states_TW.nbytes > self._limit_bytes:
            self._settle_oldest()
        held_s = time.perf_counter() - start
        figures = target_s, held_s, self._num_bytes() + states_TW.nbytes, self._laps.lap_s()
        told = torch.tensor(figures, dtype=torch.float64)
        with self._ranks.talking("states are sent"):
            works = tuple(self._ranks.post(tensor, to) for tensor in (states_TW, told))
        self._under_way.append(_Parcel(states_TW.nbytes, states_TW, told, works))

    def settle(self) -> None:
        """Waits until everything is taken."""
        while self._under_way:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        with self._ranks.talking("sent states wait to be taken"):
            self._under_way.popleft().arrive(self._timeout)

    def _num_bytes(self) -> int:
        return sum(parcel.num_bytes for parcel in self._under_way)


class Inbox:
    """What a drafter rank awaits: its next rows, as many as may be asked for and as it has room for."""

    def __init__(self, ranks: Ranks, traffic: Traffic, limit_bytes: int, timeout: timedelta) -> None:
        self._ranks = ranks
        self._traffic = traffic
        self._limit_bytes = limit_bytes
        self._timeout = timeout
        self._coming = (row for row in traffic.known_rows() if row is None or self._is_own(row))
        self._next: PlannedRow | None = None
        self._awaited: deque[_Parcel] = deque()

    def take(self) -> tuple[Float[Tensor, "T W"], Toll]:
        """The states of the next row, which must be planned, waited for."""
        self._await_more()
        start = time.perf_counter()
        parcel = self._awaited.popleft()
        with self._ranks.talking("states are awaited"):
            parcel.arrive(self._timeout)
        waiting_s = time.perf_counter() - start
        target_s, held_s, in_flight_bytes, span_s = parcel.told.tolist()
        self._await_more()
        return parcel.states_TW, Toll(target_s, waiting_s, held_s, int(in_flight_bytes), span_s)

    def _await_more(self) -> None:
        while row := self._next or next(self._coming, None):
            self._next = row
            if not self._has_room(row):
                return
            self._awaited.append(self._post(row))
            self._next = None

    def _is_own(self, row: PlannedRow) -> bool:
        return self._ranks.layout.drafter_of(row) == self._ranks.rank

    def _has_room(self, row: PlannedRow) -> bool:
        held = sum(parcel.num_bytes for parcel in self._awaited)
        return not held or held + self._traffic.num_bytes(row) <= self._limit_bytes

    def _post(self, row: PlannedRow) -> _Parcel:
        sender, traffic = self._ranks.layout.target_of(row), self._traffic
        size = traffic.num_tokens(row), traffic.width
        states_TW = torch.empty(size, dtype=traffic.dtype, device=self._ranks.device)
        told = torch.empty(_NUM_TOLD, dtype=torch.float64)
        with self._ranks.talking("states are asked for"):
            works = tuple(dist.irecv(tensor, sender, group=self._ranks.transfers) for tensor in (states_TW, told))
        return _Parcel(traffic.num_bytes(row), states_TW, told, works)


@dataclass(frozen=True)
class Arriving:
    """Rows read by target ranks."""

    take: Callable[[], tuple[Tensor, Toll]]
    """Gives the next row's, as `Inbox.take` does."""
    num_features: int
    """K * H; what a token has beyond it is the last layer's."""

    def read(self, documents: Sequence[Sample]) -> RowStates:
        """The states of this rank's next row; rows come in the order of the run."""
        states_TW, toll = self.take()
        lengths = [len(document.input_ids) for document in documents]
        assert sum(lengths) == len(states_TW), "both sides follow one plan"
        return RowStates([self._parted(part_TW) for part_TW in states_TW.split(lengths)], toll)

    def _parted(self, states_TW: Float[Tensor, "T W"]) -> DocumentStates:
        last_TH = states_TW[:, self.num_features :]
        return DocumentStates(states_TW[:, : self.num_features], last_TH if last_TH.shape[1] else None)


def _nothing(_num_steps: int) -> None:
    """Where nothing comes before the rows of a step."""


@dataclass(frozen=True)
class Supply:
    """What a target rank does: reads its rows, and sends each to the drafter rank that learns from it."""

    ranks: Ranks
    traffic: Traffic
    samples: SampleSet
    source: RowSource
    before: Callable[[int], None] = _nothing
    """Told how many steps have their rows before those of the next are read, and when all have them."""

    def run(self, outbox: Outbox, stop: Stop) -> None:
        """Reads from the first row to the last."""
        for step in self.traffic.visits():
            self.before(step)
            stop.check()
            for row in self.traffic.micros_of(step):
                if self.ranks.layout.target_of(row) == self.ranks.rank:
                    read = self.source.read(self.samples.documents(row.samples, row.lengths))
                    outbox.send(row, joined_states(read.documents), read.toll.target_s)
                    stop.check()
        self.before(self.traffic.num_steps)
        outbox.settle()


def joined_states(documents: Sequence[DocumentStates]) -> Float[Tensor, "T W"]:
    """The states of a row as they travel: documents end to end, the last layer's beside the features."""
    features_TF = _end_to_end([read.features_TF for read in documents])
    lasts = [read.last_TH for read in documents if read.last_TH is not None]
    return torch.cat([features_TF, _end_to_end(lasts)], dim=1) if lasts else features_TF


def _end_to_end(parts: Sequence[Tensor]) -> Tensor:
    """One document alone is not copied."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))
