"""Who does what in a run, and where: what each rank holds, which rows are whose, which CUDA devices are whose.

    placement   ranks 0 .. D-1                  ranks D .. D+T-1
    shared      target, drafter, optimizer      -
    split       drafter, optimizer              target

Row m of the stream of rows is learnt from by drafter rank m mod D, and in placement split read by target rank m mod T:
functions of m alone, so that nothing depends on timing. On a host with CUDA a rank takes the devices behind those of
the ranks before it: `target_gpus` of them where it holds a target, else one.
"""

import os
from dataclasses import dataclass
from math import lcm

import torch

from draftmill.contracts.errors import RecipeError
from draftmill.extract.spread import device_kind, first_devices
from draftmill.settings.train import TrainSettings
from draftmill.train.rows import PlannedRow


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

    def holds_drafter(self, rank: int) -> bool:
        """Whether a rank trains the drafter."""
        return rank < self.num_drafters

    def holds_target(self, rank: int) -> bool:
        """Whether a rank holds the target."""
        return rank >= self.first_target

    def drafter_of(self, row: PlannedRow) -> int:
        """The rank that learns from a row."""
        return row.index % self.num_drafters

    def target_of(self, row: PlannedRow) -> int:
        """The rank whose target reads a row."""
        return self.first_target + row.index % self.num_targets

    def pairs(self) -> list[tuple[int, int]]:
        """The target rank and the drafter rank of every pair that rows cross between, in the order of their first."""
        numbers = range(lcm(self.num_targets, self.num_drafters))
        return [(self.first_target + m % self.num_targets, m % self.num_drafters) for m in numbers]

    def name(self, rank: int) -> str:
        """A rank as people are told of it."""
        if not self.is_split:
            return f"rank {rank} of {self.world}"
        role = f"drafter {rank}" if rank < self.num_drafters else f"target {rank - self.num_drafters}"
        return f"rank {rank} ({role})"


def layout_of(settings: TrainSettings) -> Layout:
    """The layout that settings and torchrun ask for; RecipeError where they disagree or CUDA is not there."""
    device_kind(settings.device)
    started = started_ranks()
    if settings.placement == "split":
        layout = Layout(settings.drafter_ranks, settings.target_ranks, is_split=True)
    else:
        count = settings.ranks or started or 1
        layout = Layout(count, count, is_split=False)
    if started is not None and layout.world != started:
        raise RecipeError(
            f"torchrun started {started} processes, but --placement {settings.placement} is of {layout.world}: "
            "start as many, or change --ranks, or --target-ranks and --drafter-ranks"
        )
    return layout


def started_ranks() -> int | None:
    """How many ranks the launcher started, of which this process is one; None: it was started alone. RecipeError where
    it does not say so whole.
    """
    if "RANK" not in os.environ:
        return None
    rank, count = _number("RANK"), _number("WORLD_SIZE")
    if rank >= count:
        raise RecipeError(f"RANK {rank} of WORLD_SIZE {count}: ranks are numbered from 0; start them by torchrun")
    return count


def meeting_rank() -> int:
    """This process's number among those that meet by MASTER_ADDR and MASTER_PORT; RecipeError where one is missing."""
    _said_by_launcher("MASTER_ADDR")
    _number("MASTER_PORT")
    return _number("RANK")


def _number(name: str) -> int:
    said = _said_by_launcher(name)
    if not said.isdecimal():
        raise RecipeError(f"{name} is {said!r}, and a whole number is wanted: start ranks by torchrun, which sets it")
    return int(said)


def _said_by_launcher(name: str) -> str:
    if not (said := os.environ.get(name)):
        raise RecipeError(
            f"RANK is set, so this process is taken for one of several that a launcher started, and {name} is not set: "
            "start ranks by torchrun, which sets both, or unset RANK"
        )
    return said


@dataclass(frozen=True)
class Seat:
    """Where a launcher put a rank."""

    rank: int
    local_rank: int
    """Its number among the ranks of its host."""
    local_world: int
    """How many they are."""


def devices_of(settings: TrainSettings, layout: Layout) -> tuple[torch.device, ...]:
    """The devices of this rank; the first is its own, where it trains, and where hidden states are brought."""
    if device_kind(settings.device) == "cpu":
        return first_devices("cpu", settings.target_gpus)
    numbers = cuda_numbers(layout, settings.target_gpus, _seat(), torch.cuda.device_count())
    torch.cuda.set_device(numbers[0])
    return tuple(torch.device("cuda", number) for number in numbers)


def _seat() -> Seat:
    if started_ranks() is None:
        return Seat(0, 0, 1)
    return Seat(*map(_number, ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))


def cuda_numbers(layout: Layout, target_gpus: int, seat: Seat, num_found: int) -> range:
    """Which CUDA devices of its host a rank takes; RecipeError where the ranks of the host take more than it has."""
    first = seat.rank - seat.local_rank
    taken = [target_gpus if layout.holds_target(first + i) else 1 for i in range(seat.local_world)]
    if sum(taken) > num_found:
        raise RecipeError(
            f"{seat.local_world} ranks of this host take {sum(taken)} CUDA devices (--target-gpus {target_gpus} for "
            f"each that holds a target, one for any other), and it has {num_found}: start fewer ranks, or lower "
            "--target-gpus"
        )
    start = sum(taken[: seat.local_rank])
    return range(start, start + taken[seat.local_rank])
