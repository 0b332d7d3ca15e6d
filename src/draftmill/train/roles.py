"""What a rank does in a run: reads with the target, trains the drafter, or both."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch

from draftmill.contracts.errors import DataGateError, InputError, RecipeError, StorageError
from draftmill.extract.agreement import check_target, sound_texts
from draftmill.extract.packing import extractor_of
from draftmill.extract.spread import ends_on, place
from draftmill.extract.taps import TapReader, check_taps
from draftmill.extract.target import DTYPES, Ends, Target, load_target, refuse_unfit_hybrid
from draftmill.model.drafter import Drafter
from draftmill.model.forms import attention_form
from draftmill.model.shape import DrafterShape
from draftmill.settings.train import TrainSettings
from draftmill.train.asking import Asked, Asking, Standing, until_next_due
from draftmill.train.batches import Batches, BatchRule
from draftmill.train.data import TrainingData
from draftmill.train.features import OwnTarget, RowSource, TargetFeatures
from draftmill.train.held_out import Gauge, HeldOut, MeasuringError
from draftmill.train.interruption import Stop, StoppedError, listening
from draftmill.train.keep import Checkpoints
from draftmill.train.logbook import Kept, Logbook, make_up, open_logbook
from draftmill.train.loop import LossOf, Schedule, train
from draftmill.train.ranks import RankLostError, Ranks
from draftmill.train.start import drafter_shape, initial_drafter, tap_ids_of
from draftmill.train.state import RunState, new_run
from draftmill.train.transit import Arriving, Inbox, Outbox, Supply, Traffic, meet

log = logging.getLogger(__name__)

# Samples that the target itself is asked about before anything is learnt from them, and how many are passed over for
# states that are not finite to find these: as many as training would, but no whole set is searched for one.
NUM_CHECKED, MOST_PASSED_OVER = 2, 10
_LOAN = "what a drafter needs of the target"


@dataclass(frozen=True)
class Job:
    """What all ranks of a run are told, each by its own reading."""

    settings: TrainSettings
    data: TrainingData
    folder: Path
    """The target's."""
    ranks: Ranks

    @property
    def timeout(self) -> timedelta:
        """How long another rank is waited for."""
        return timedelta(seconds=self.settings.rank_timeout_s)

    @property
    def dtype(self) -> torch.dtype:
        """What the target computes in, and hands on."""
        return DTYPES[self.settings.compute_dtype]


@dataclass(frozen=True)
class Loan:
    """What a drafter rank has of the target before its first step."""

    ends: Ends
    drafter: Drafter

    def on(self, device: torch.device) -> "Loan":
        """Everything on one device, as far as it is not there."""
        return Loan(ends_on(self.ends, device), self.drafter.to(device))


def take_part(job: Job, checkpoints: Checkpoints | None) -> Logbook | None:
    """Does this rank's part from start to end; the logbook, on the rank that keeps one (and has `checkpoints`)."""
    with telling_of_full_devices(job.ranks):
        return _take_part(job, checkpoints)


@contextmanager
def telling_of_full_devices(ranks: Ranks) -> Iterator[None]:
    """RecipeError where a device runs out of memory, with what takes less of it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RecipeError(
            f"{ranks.layout.name(ranks.rank)}: {ranks.device} is full ({str(error).splitlines()[0]}): lower "
            "--max-tokens, --num-anchors, --in-flight-bytes or --feature-cache-bytes, give --compute-dtype bfloat16, "
            "or give the target devices of its own (--placement split) or several (--target-gpus); what is "
            "published stays"
        ) from error


def _take_part(job: Job, checkpoints: Checkpoints | None) -> Logbook | None:
    ranks = job.ranks
    if not ranks.has_target:
        log.info("waiting for %s, which loads the target and checks it", ranks.layout.name(ranks.layout.first_target))
        return _learn(job, _borrowed(ranks), None, checkpoints)
    target = open_target(job)
    if ranks.is_first_target:
        refuse_unfit(job, target)
    if ranks.has_drafter:
        return _learn(job, _loan(job, target).on(ranks.device), target, checkpoints)
    if ranks.is_first_target:
        _lend(ranks, _loan(job, target))
    _read_for_others(job, target)
    return None


def _borrowed(ranks: Ranks) -> Loan:
    """What the first target rank lends; what has arrived on the CPU is given up when it lies on the device."""
    loan: Loan = ranks.take(ranks.layout.first_target, _LOAN)
    return loan.on(ranks.device)


def _lend(ranks: Ranks, loan: Loan) -> None:
    """Gives a loan to every drafter rank, from the CPU, which holds it no longer than that."""
    lent = loan.on(torch.device("cpu"))
    for rank in range(ranks.layout.num_drafters):
        ranks.give(rank, lent, _LOAN)


def open_target(job: Job) -> Target:
    """The frozen target where and as it computes."""
    target = load_target(job.folder, dtype=job.dtype)
    refuse_unfit_hybrid(target, job.ranks.device)
    place(target, job.ranks.devices)
    return target


def refuse_unfit(job: Job, target: Target) -> None:
    """An error where the target is not what the set was made for, or is not read where it should be."""
    log.info("checking the target: are its layers read where they should be, and does it know the set's answers")
    num_looked_at = NUM_CHECKED + min(job.settings.max_poisoned, MOST_PASSED_OVER)
    whole = TapReader(target, tap_ids_of(target, job.settings), has_last=True)
    texts = sound_texts(whole, job.data.first_texts(num_looked_at), NUM_CHECKED)
    if not texts:
        raise InputError(f"{job.settings.input} holds no samples: tokenize again and look at its card")
    check_taps(_reader(job, target), torch.tensor([texts[0].token_ids], device=target.device))
    check_target(target, texts, job.settings.min_agreement)


def _reader(job: Job, target: Target) -> TapReader:
    return TapReader(target, tap_ids_of(target, job.settings), has_last=job.settings.needs_last_state)


def _loan(job: Job, target: Target) -> Loan:
    return Loan(target, initial_drafter(target, job.settings, job.data.mask_id))


def _read_for_others(job: Job, target: Target) -> None:
    shape = drafter_shape(target, job.settings, job.data.mask_id)
    standing = _standing(job, None)
    traffic = _traffic(job, shape, standing.step, job.data.rows.is_known)
    meet(job.ranks)
    outbox = Outbox(job.ranks, traffic, job.settings.in_flight_bytes, job.timeout)
    supply = Supply(job.ranks, traffic, job.data.samples, _own_target(job, target))
    with listening() as stop:
        job.data.heed(stop.check)
        if job.settings.eval_every is not None and job.ranks.is_first_target:
            due = job.settings.eval_every, job.data.num_steps
            asked = Asked(job.ranks, _held_out(job, target, stop), *due, standing.measured)
            supply = replace(supply, before=asked.until)
        supply.run(outbox, stop)


def _held_out(job: Job, target: Target, stop: Stop) -> HeldOut:
    held_out = HeldOut(target, job.data.held_out, job.data.stop_ids, job.settings)
    held_out.heed = stop.check
    return held_out


def _own_target(job: Job, target: Target) -> OwnTarget:
    sizes = {"max_tokens": job.settings.max_tokens, "cache_bytes": job.settings.feature_cache_bytes}
    extractor = extractor_of(_reader(job, target), job.settings.target_packing)
    return OwnTarget(TargetFeatures(extractor, target.device, **sizes))


def _learn(job: Job, loan: Loan, target: Target | None, checkpoints: Checkpoints | None) -> Logbook | None:
    state = new_run(loan.drafter, job.settings)
    kept = None if checkpoints is None else Kept.of(state, checkpoints)
    _agree(job.ranks, state)
    standing = _standing(job, kept)
    source = _arriving(job, state, standing.step) if target is None else _own_target(job, target)
    schedule = schedule_of(job, source, loan.ends, state.drafter.shape)
    with listening() as stop:
        job.data.heed(stop.check)
        if kept is None:
            train(state, schedule, job.settings, stop.then(_tell_nobody))
            return None
        kept.checkpoints.behind.heed = stop.check
        gauge = _gauge(job, target, stop)
        with _leaving(kept, stop):
            make_up(kept, gauge, job.settings.eval_every)
        with open_logbook(kept, gauge, job.settings) as logbook, _leaving(kept, stop):
            train(state, schedule, job.settings, stop.then(logbook.after_step))
            kept.checkpoints.behind.settle()
        return logbook


@contextmanager
def _leaving(kept: Kept, stop: Stop) -> Iterator[None]:
    """A run that ends between two steps loses nothing: stopped, left by another rank, without a part to go on with,
    without memory to be measured, or with a store that stays away, it leaves a checkpoint there."""
    try:
        yield
    except (StoppedError, RankLostError, StorageError, DataGateError, MeasuringError) as error:
        kept.checkpoints.leave(kept.run, kept.metrics.whole)
        if stop.is_asked:  # the others were stopped too, and were faster
            raise StoppedError from error
        raise


def _gauge(job: Job, target: Target | None, stop: Stop) -> Gauge | None:
    if job.settings.eval_every is None:
        return None
    if target is None:
        return Asking(job.ranks, job.dtype).measure
    return _held_out(job, target, stop).measure


def _agree(ranks: Ranks, state: RunState) -> None:
    """Drafter ranks stand where rank 0 stands."""
    if ranks.layout.num_drafters > 1:
        files = ranks.share_files(state.files() if ranks.is_writer else None)
        if not ranks.is_writer:
            state.restore(files)


def _standing(job: Job, kept: Kept | None) -> Standing:
    """Where the run goes on, as rank 0 knows."""
    mine = None if kept is None else Standing(kept.run.position.step, kept.measured(job.settings.eval_every))
    standing = job.ranks.tell(mine)
    assert standing is not None, "rank 0 tells it"
    return standing


def _arriving(job: Job, state: RunState, first_step: int) -> Arriving:
    data, shape = job.data, state.drafter.shape
    may_ask = until_next_due(data.rows.is_known, lambda: state.position.step, job.settings.eval_every, data.num_steps)
    traffic = _traffic(job, shape, first_step, may_ask)
    meet(job.ranks)
    inbox = Inbox(job.ranks, traffic, job.settings.in_flight_bytes, job.timeout)
    return Arriving(inbox.take, shape.num_taps * shape.hidden_size)


def _traffic(job: Job, shape: DrafterShape, first_step: int, is_known: Callable[[int], bool]) -> Traffic:
    """What crosses between target and drafter ranks, for a drafter of this shape."""
    settings, data = job.settings, job.data
    return Traffic(
        micros_of=data.rows.micros_of,
        is_known=is_known,
        first_step=first_step,
        num_steps=data.num_steps,
        draws_per_pass=settings.draws_per_pass,
        width=(shape.num_taps + int(settings.needs_last_state)) * shape.hidden_size,
        dtype=job.dtype,
    )


def _tell_nobody(*_: object) -> None:
    """What follows a step on a rank that keeps no logbook."""


def schedule_of(job: Job, source: RowSource, ends: Ends, shape: DrafterShape) -> Schedule:
    """Which rows each step takes, how they become batches, and what they cost."""
    settings, data = job.settings, job.data
    attention = attention_form(settings.attention, shape, ends.device)
    num_drafters = job.ranks.layout.num_drafters
    rule = BatchRule.of(settings, is_constant=attention.wants_constant_shapes, num_drafters=num_drafters)
    batches = Batches(data.samples, source, shape, settings.seed, rule)
    seen_ids = data.gated.seen_ids() if settings.loss_vocab == "seen" else ()
    loss_of = LossOf(ends, settings, seen_ids, attention)
    return Schedule(data.num_steps, data.rows.micros_of, batches.batch_at, loss_of, job.ranks)
