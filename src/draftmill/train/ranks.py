"""The processes of a run among themselves: what they tell each other, and how their sums become one.

Which of them does what is the layout's (`layout.py`). Rank 0 writes. Once a step the drafter ranks add up gradients
(float32) and figures, and all make the same move. DistributedDataParallel would add gradients inside the last backward
pass of a step, and so wants every rank to have one; here a rank that has no row in the step takes part with zeros.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from draftmill.contracts.errors import DraftmillError
from draftmill.settings.train import TrainSettings
from draftmill.train.clock import wait_for
from draftmill.train.layout import Layout, devices_of, layout_of, meeting_rank
from draftmill.train.lending import pieces, put_together, taken_apart
from draftmill.train.metrics import StepSums
from draftmill.train.rows import PlannedRow

T = TypeVar("T")
Group = Any  # a ProcessGroup, which torch's stubs do not know

# Messages and small tensors of the host go by gloo, whatever moves those of the devices.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_CHUNK_BYTES = 1 << 26
_IN_SOURCES = re.compile(r"\[/[^\]]*\] ?")
# Where the first target rank tells of the target, and where every drafter rank would say the same.
_OF_THE_TARGET, _OF_ALL = ("draftmill.extract", "draftmill.train.roles"), "draftmill.train.loop"


class RankLostError(DraftmillError, ConnectionError):
    """Another rank ended, or said nothing for too long."""


@dataclass(frozen=True)
class Groups:
    """Who talks to whom, apart from all to all."""

    drafters: Group | None
    """Gradients and figures; None where there is one drafter rank, or this is none."""
    transfers: Group
    """Hidden states alone, so that they never wait behind gradients."""


class Ranks:
    """This process among those of the run."""

    def __init__(self, layout: Layout, rank: int, devices: tuple[torch.device, ...], groups: Groups | None) -> None:
        self.layout = layout
        self.rank = rank
        self.devices = devices
        self._groups = groups
        self._drafters = groups and groups.drafters

    @property
    def device(self) -> torch.device:
        """The one device of this rank, or the first of those that its target is spread over."""
        return self.devices[0]

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes checkpoints, metrics and the card."""
        return self.rank == 0

    @property
    def has_drafter(self) -> bool:
        """Whether this rank trains the drafter."""
        return self.layout.holds_drafter(self.rank)

    @property
    def has_target(self) -> bool:
        """Whether this rank holds the target."""
        return self.layout.holds_target(self.rank)

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

    def greet(self, source: int, to: int) -> None:
        """Sends a number from one rank to another, of which this is one; the first message of a pair joins them."""
        number = torch.zeros(1, device=self.device)
        with self.talking("ranks that states cross between are joined"):
            if self.rank == source:
                dist.send(number, to, group=self.transfers)
            else:
                dist.recv(number, source, group=self.transfers)

    def post(self, tensor: torch.Tensor, to: int) -> Any:
        """Sends a tensor in the group of transfers; returns at once what may be waited for until it is taken."""
        return dist.isend(tensor, to, group=self.transfers)

    def give(self, to: int, value: Any, what: str) -> None:
        """Gives another rank a copy of a value that lies on the CPU; returns when it is taken. Never in the group of
        transfers, where receives of states may be waiting already.
        """
        structure, tensors = taken_apart(value)
        with self.talking(f"{what} is sent"):
            dist.send_object_list([structure], dst=to)
            for piece in pieces(tensors):
                dist.send(piece, to)

    def take(self, source: int, what: str) -> Any:
        """What another rank gives this one, on the CPU."""
        structure = [b""]
        with self.talking(f"{what} is awaited"):
            dist.recv_object_list(structure, src=source)
        value, tensors = put_together(structure[0])
        with self.talking(f"{what} is awaited"):
            for piece in pieces(tensors):
                dist.recv(piece, source)
        return value

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

    def wait_for_others(self) -> None:
        """Returns when every drafter rank is as far; gloo notices at once that one is gone, NCCL does not."""
        if self._drafters is not None:
            with self.talking("the others' rows are waited for"):
                dist.all_reduce(torch.zeros(1), group=self._drafters)

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
            total = replace(StepSums.of_values(values.tolist(), len(sums.correct_J)), clock=sums.clock)
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
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # this rank's own
        raise
    except RuntimeError as error:  # what torch.distributed raises, whichever backend is at work
        raise RankLostError(
            f"{name} lost another rank while {what} ({_reason(error)}): look for the one that ended first, and run the "
            "same command again to go on; where all of them still live, one took longer than --rank-timeout-s: raise it"
        ) from error


def _reason(error: RuntimeError) -> str:
    """The backend's first line, without where in its sources it was written, or what it adds to cheer people up."""
    first = (str(error).strip().splitlines() or [""])[0]
    return _IN_SOURCES.sub("", first).partition(". ")[0].strip() or type(error).__name__


def _group(ranks: Sequence[int], timeout: timedelta) -> Group:
    """A group as patient as the whole: left to itself torch waits 30 minutes in a new one."""
    return dist.new_group(ranks, timeout=timeout)


def alone(*devices: torch.device) -> Ranks:
    """A run of one process."""
    return Ranks(Layout(1, 1, is_split=False), 0, devices, None)


@contextmanager
def joined(settings: TrainSettings) -> Iterator[Ranks]:
    """This process as one of the run's; the others are waited for."""
    torch.set_num_threads(settings.threads)
    layout = layout_of(settings)
    devices = devices_of(settings, layout)
    if layout.world == 1:
        yield alone(*devices)
        return
    rank = meeting_rank()
    timeout = timedelta(seconds=settings.rank_timeout_s)
    with _answered(layout.name(rank), "all of them were called together"):
        dist.init_process_group(BACKENDS[devices[0].type], timeout=timeout)
        drafters = _group(range(layout.num_drafters), timeout) if layout.num_drafters > 1 else None
        transfers = _group(range(layout.world), timeout)
    ranks = Ranks(layout, rank, devices, Groups(drafters if layout.holds_drafter(rank) else None, transfers))
    _part_the_telling(ranks)
    yield ranks
    # Not after a failure: it would wait for ranks that are gone.
    with _answered(layout.name(rank), "all of them were parting"):
        dist.destroy_process_group()


def _part_the_telling(ranks: Ranks) -> None:
    """What all ranks know is told once: of the run by rank 0, of the target by the first rank that holds one.

    Warnings of others are heard, for they may be of their host alone.
    """
    logging.getLogger("draftmill").setLevel(logging.NOTSET if ranks.is_writer else logging.WARNING)
    for name in _OF_THE_TARGET:
        logging.getLogger(name).setLevel(logging.INFO if ranks.is_first_target else logging.NOTSET)
    logging.getLogger(_OF_ALL).setLevel(logging.NOTSET if ranks.is_writer else logging.ERROR)
