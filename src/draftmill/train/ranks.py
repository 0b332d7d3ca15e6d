"""The processes of a run: who holds what, what they tell each other, and how their sums become one.

    placement   ranks 0 .. D-1                  ranks D .. D+T-1
    shared      target, drafter, optimizer      -
    split       drafter, optimizer              target

Row m of the stream of rows is learnt from by drafter rank m mod D, and in placement split read by target rank m mod T:
functions of m alone, so that nothing depends on timing. Rank 0 writes. Once a step the drafter ranks add up gradients
(float32) and figures, and all make the same move. DistributedDataParallel would add gradients inside the last backward
pass of a step, and so wants every rank to have one; here a rank that has no row in the step takes part with zeros.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from draftmill.contracts.errors import DraftmillError, RecipeError
from draftmill.settings.train import TrainSettings
from draftmill.train.clock import wait_for
from draftmill.train.metrics import StepSums
from draftmill.train.rows import PlannedRow

T = TypeVar("T")
Group = Any  # a ProcessGroup, which torch's stubs do not know

# Messages and small tensors of the host go by gloo, whatever moves those of the devices.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_CHUNK_BYTES = 1 << 26


class RankLostError(DraftmillError, ConnectionError):
    """Another rank ended, or said nothing for too long."""


@dataclass(frozen=True)
class Layout:
    """Which rank does what."""

    num_drafters: int
    num_targets: int
    is_split: bool

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.num_drafters + (self.num_targets if self.is_split else 0)

    @property
    def first_target(self) -> int:
        """The first rank that holds a target."""
        return self.num_drafters if self.is_split else 0

    def drafter_of(self, row: PlannedRow) -> int:
        """The rank that learns from a row."""
        return row.index % self.num_drafters

    def target_of(self, row: PlannedRow) -> int:
        """The rank whose target reads a row."""
        return self.first_target + row.index % self.num_targets

    def name(self, rank: int) -> str:
        """A rank as people are told of it."""
        if not self.is_split:
            return f"rank {rank} of {self.world}"
        role = f"drafter {rank}" if rank < self.num_drafters else f"target {rank - self.num_drafters}"
        return f"rank {rank} ({role})"


def layout_of(settings: TrainSettings) -> Layout:
    """The layout that settings and torchrun ask for; RecipeError where they disagree."""
    started = started_ranks()
    if settings.placement == "split":
        layout = Layout(settings.drafter_ranks, settings.target_ranks, is_split=True)
    else:
        count = settings.ranks or started or 1
        layout = Layout(count, count, is_split=False)
    if started is not None and layout.world != started:
        raise RecipeError(
            f"torchrun started {started} processes, but placement {settings.placement} is of {layout.world}: "
            "start as many, or change ranks, target_ranks and drafter_ranks"
        )
    return layout


def started_ranks() -> int | None:
    """How many ranks the launcher started, of which this process is one; None: it was started alone."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None


@dataclass(frozen=True)
class Groups:
    """Who talks to whom, apart from all to all."""

    drafters: Group | None
    """Gradients and figures; None where there is one drafter rank, or this is none."""
    transfers: Group
    """Hidden states alone, so that they never wait behind gradients."""


class Ranks:
    """This process among those of the run."""

    def __init__(self, layout: Layout, rank: int, device: torch.device, groups: Groups | None) -> None:
        self.layout = layout
        self.rank = rank
        self.device = device
        self._groups = groups
        self._drafters = groups and groups.drafters

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes checkpoints, metrics and the card."""
        return self.rank == 0

    @property
    def has_drafter(self) -> bool:
        """Whether this rank trains the drafter."""
        return self.rank < self.layout.num_drafters

    @property
    def has_target(self) -> bool:
        """Whether this rank holds the target."""
        return not self.layout.is_split or not self.has_drafter

    @property
    def is_first_target(self) -> bool:
        """Whether this rank is the one that is asked whether the target will do."""
        return self.rank == self.layout.first_target

    @property
    def transfers(self) -> Group:
        """The group that hidden states travel in; all ranks are in it."""
        assert self._groups is not None, "a rank alone sends nothing"
        return self._groups.transfers

    def own(self, rows: Iterable[PlannedRow]) -> list[PlannedRow]:
        """Those of the rows that this rank learns from."""
        return [row for row in rows if self.layout.drafter_of(row) == self.rank]

    def tell(self, value: T | None, source: int = 0) -> T | None:
        """What rank `source` says, on every rank; the other ranks' `value` counts for nothing."""
        if self._groups is None:
            return value
        said = [value]
        with self.talking("what to do next is told"):
            dist.broadcast_object_list(said, src=source)
        return said[0]

    def lend(self, value: Any) -> None:
        """The first target rank gives every drafter rank a copy of what it needs before the first step."""
        with self.talking("the target's ends are sent"):
            for rank in range(self.layout.num_drafters):
                dist.send_object_list([value], dst=rank, group=self.transfers)

    def borrow(self) -> Any:
        """What the first target rank gives this drafter rank."""
        lent: list[Any] = [None]
        with self.talking("the target's ends are awaited"):
            dist.recv_object_list(lent, src=self.layout.first_target, group=self.transfers)
        return lent[0]

    def share_files(self, files: dict[str, bytes] | None) -> dict[str, bytes]:
        """Rank 0's files, on every drafter rank: raw bytes, for a checkpoint may be larger than what pickles well."""
        if self._drafters is None:
            assert files is not None, "rank 0 gives its files"
            return files
        sizes: list[Any] = [None if files is None else {name: len(data) for name, data in files.items()}]
        with self.talking("the first weights are told"):
            dist.broadcast_object_list(sizes, src=0, group=self._drafters)
            return {name: self._share(None if files is None else files[name], size) for name, size in sizes[0].items()}

    def _share(self, data: bytes | None, size: int) -> bytes:
        whole = bytearray(0 if data else size)
        for start in range(0, size, _CHUNK_BYTES):
            stop = min(start + _CHUNK_BYTES, size)
            chunk = np.empty(stop - start, dtype=np.uint8)
            if data:
                chunk[:] = np.frombuffer(data, dtype=np.uint8, count=stop - start, offset=start)
            dist.broadcast(torch.from_numpy(chunk), src=0, group=self._drafters)
            whole[start:stop] = b"" if data else chunk.data
        return data or bytes(whole)

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gradients become their sums over the drafter ranks."""
        if self._drafters is None:
            return
        with self.talking("gradients are added up"):
            for work in [self._add(parameter) for parameter in parameters]:
                work.wait()
            wait_for(self.device)

    def _add(self, parameter: nn.Parameter) -> Any:
        if parameter.grad is None:  # no row of this step was this rank's
            parameter.grad = torch.zeros_like(parameter)
        return dist.all_reduce(parameter.grad, group=self._drafters, async_op=True)

    def add_figures(self, sums: StepSums) -> StepSums:
        """The figures of all drafter ranks."""
        total = sums if self._drafters is None else self._added(sums, self._drafters)
        return replace(total, target_ranks=self.layout.num_targets if self.layout.is_split else 0)

    def _added(self, sums: StepSums, drafters: Group) -> StepSums:
        values = torch.tensor(sums.values(), dtype=torch.float64)
        with self.talking("figures are added up"):
            dist.all_reduce(values, group=drafters)
            total = StepSums.of_values(values.tolist(), len(sums.correct_J))
            return replace(total, poisoned=self._gathered(sums.poisoned, drafters)) if total.num_poisoned else total

    def _gathered(self, names: list[str], drafters: Group) -> list[str]:
        gathered: list[Any] = [None] * self.layout.num_drafters
        dist.all_gather_object(gathered, names, group=drafters)
        return [name for some in gathered for name in some]

    def check_equal(self, parameters: Sequence[nn.Parameter]) -> None:
        """AssertionError where drafter ranks do not hold the same weights: sums of their bits are compared."""
        if self._drafters is None:
            return
        mine = [int(p.detach().view(torch.int32).sum(dtype=torch.int64)) for p in parameters]
        gathered: list[Any] = [None] * self.layout.num_drafters
        with self.talking("weights are compared"):
            dist.all_gather_object(gathered, mine, group=self._drafters)
        differing = [rank for rank, theirs in enumerate(gathered) if theirs != gathered[0]]
        assert not differing, f"the weights of ranks {differing} are not those of rank 0"

    def talking(self, what: str) -> AbstractContextManager[None]:
        """RankLostError where another rank does not answer."""
        return _answered(self.layout.name(self.rank), what)


@contextmanager
def _answered(name: str, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what torch.distributed raises, whichever backend is at work
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RankLostError(
            f"{name} lost another rank while {what} ({reason}): look for the one that ended first, and run the same "
            "command again to go on"
        ) from error


def alone(device: torch.device) -> Ranks:
    """A run of one process."""
    return Ranks(Layout(1, 1, is_split=False), 0, device, None)


@contextmanager
def joined(settings: TrainSettings) -> Iterator[Ranks]:
    """This process as one of the run's; the others are waited for."""
    torch.set_num_threads(settings.threads)
    device = _device(settings)
    layout = layout_of(settings)
    if layout.world == 1:
        yield alone(device)
        return
    rank = int(os.environ["RANK"])
    timeout = timedelta(seconds=settings.rank_timeout_s)
    with _answered(layout.name(rank), "all of them were called together"):
        dist.init_process_group(BACKENDS[device.type], timeout=timeout)
        drafters = dist.new_group(range(layout.num_drafters)) if layout.num_drafters > 1 else None
        transfers = dist.new_group(range(layout.world))
    is_drafter = rank < layout.num_drafters
    yield Ranks(layout, rank, device, Groups(drafters if is_drafter else None, transfers))
    # Not after a failure: it would wait for ranks that are gone.
    with _answered(layout.name(rank), "all of them were parting"):
        dist.destroy_process_group()


def _device(settings: TrainSettings) -> torch.device:
    """The device of this rank: on CUDA one for each rank of a host."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    kind = found if settings.device == "auto" else settings.device
    if kind == "cpu" or started_ranks() is None:
        return torch.device(kind)
    here, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if here >= devices:
        raise RecipeError(f"{here + 1} or more ranks on a host of {devices} CUDA devices: every rank needs its own")
    torch.cuda.set_device(here)
    return torch.device("cuda", here)
