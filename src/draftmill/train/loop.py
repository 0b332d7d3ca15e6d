"""The loop: one counter, batches a pure function of it, one mean over the whole step however it was cut."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from draftmill.contracts.errors import DraftmillError
from draftmill.extract.target import Ends
from draftmill.model.drafter import Drafter
from draftmill.model.forms import AttentionForm
from draftmill.model.loss import BlockLoss, LossRule, Truth
from draftmill.model.vocabulary import Objective
from draftmill.settings.train import TrainSettings
from draftmill.train.batches import Batch
from draftmill.train.clock import Clock, Laps, wait_for
from draftmill.train.metrics import StepSums
from draftmill.train.ranks import Ranks
from draftmill.train.rows import PlannedRow
from draftmill.train.schedule import lr_at
from draftmill.train.state import RunState

log = logging.getLogger(__name__)


class DivergedError(DraftmillError, ArithmeticError):
    """Loss or gradients were not finite for too many steps in a row, or the weights are no drafter's."""


class PoisonedError(DraftmillError, ArithmeticError):
    """The target's states of too many samples were not finite."""


class LossOf:
    """The loss of one batch: what the target lends, how slots are weighted, what is computed in which dtype."""

    def __init__(
        self, target: Ends, settings: TrainSettings, seen_ids: Sequence[int], attention: AttentionForm
    ) -> None:
        self._attention = attention
        self._embed = target.embed
        self._head_VH = target.head.weight
        self._row_of_V = torch.arange(target.vocab_size, device=target.device)
        if settings.loss_vocab == "seen":
            seen = torch.tensor(seen_ids, device=target.device)
            self._head_VH = target.head.weight[seen]
            self._row_of_V[seen] = torch.arange(len(seen), device=target.device)
        objective = Objective(hard=settings.hard_weight, kl=settings.kl_weight, tv=settings.tv_weight)
        self._rule = LossRule(settings.loss, settings.resolved_gamma, settings.alpha, objective)
        self._has_own_labels = settings.labels == "target"
        self._norm = target.norm
        self._is_mixed = settings.compute_dtype != "float32"

    def __call__(self, drafter: Drafter, batch: Batch) -> BlockLoss:
        """The weighted sum over the batch's supervised slots, and its divisor."""
        attend = self._attention.over(batch.layout)
        with torch.autocast(batch.features_TF.device.type, torch.bfloat16, enabled=self._is_mixed):
            context_TH = drafter.project(batch.features_TF)
            hidden_QH = drafter(self._embed(batch.block_ids_NB).flatten(0, 1), context_TH, batch.layout, attend)
        hidden_NJH = hidden_QH.unflatten(0, batch.block_ids_NB.shape)[:, 1:]
        return drafter.head.loss(hidden_NJH, self._truth(batch), self._head_VH, self._rule)

    def _truth(self, batch: Batch) -> Truth:
        labels_NJ = None if self._has_own_labels else self._row_of_V[batch.labels_NJ]
        with torch.no_grad():
            target_PH = None if batch.last_PH is None else self._norm(batch.last_PH)
        before_NJ = torch.cat([batch.block_ids_NB[:, :1], batch.labels_NJ[:, :-1]], dim=1)
        return Truth(batch.supervised_NJ, labels_NJ, target_PH, before_NJ)


@dataclass(frozen=True)
class Schedule:
    """How long a run is, which rows each of its steps takes, and which of them are this rank's."""

    num_steps: int
    micros_of: Callable[[int], list[PlannedRow]]
    batch_at: Callable[[PlannedRow], Batch]
    loss_of: Callable[[Drafter, Batch], BlockLoss]
    ranks: Ranks
    clock: Clock = time.perf_counter


AfterStep = Callable[[StepSums, int, float, float], None]


def train(run: RunState, schedule: Schedule, settings: TrainSettings, after_step: AfterStep) -> None:
    """Trains from where `run` stands to the end; `after_step` is told sums, epoch, learning rate, gradient norm."""
    parameters, ranks, epoch = list(run.drafter.parameters()), schedule.ranks, 0
    laps = Laps(schedule.clock)
    while run.position.step < schedule.num_steps:
        sums = StepSums.empty(run.drafter.shape.block_size - 1, schedule.clock)
        with sums.timing("waiting"):
            rows = schedule.micros_of(run.position.step)
        if rows[-1].epoch > epoch:
            ranks.check_equal(parameters)
        epoch, lr = rows[-1].epoch, lr_at(run.position.step, schedule.num_steps, settings)
        for row in ranks.own(rows):
            batch = schedule.batch_at(row)
            with sums.timing("drafter"):
                loss = schedule.loss_of(run.drafter, batch)
                loss.nats.backward()
                # Here too: figures that leave a device wait for what it has only been asked for.
                sums.add(batch, loss)
        with sums.timing("waiting"):
            ranks.wait_for_others()
        with sums.timing("optimizer"):
            ranks.add_gradients(parameters)
        sums = ranks.add_figures(sums)
        with sums.timing("optimizer"):
            grad_norm = update(run, sums, lr, settings)
            wait_for(ranks.device)  # or what is left of it would be told as the next pass of the target
        sums.wall_s = laps.lap_s()
        run.position.step += 1
        after_step(sums, epoch, lr, grad_norm)
    ranks.check_equal(parameters)
    refuse_unsound(run, schedule.num_steps)


def refuse_unsound(run: RunState, num_steps: int) -> None:
    """DivergedError where weights to be kept are not finite or overflow when squared, or none of all steps moved them.

    Norms and attention square what they are given: weights whose own norm is infinite draft nothing.
    """
    position, parameters = run.position, [*run.drafter.parameters(), *run.published.parameters()]
    norm = float(nn.utils.get_total_norm([parameter.detach() for parameter in parameters]))
    what = "" if math.isfinite(norm) else f"the norm of the weights is {norm}"
    if position.step == num_steps > 0 and position.num_updates == 0:
        what = "loss or gradient was not finite in every step: nothing was learnt"
    if what:
        raise DivergedError(
            f"step {position.step}: {what}; lower --lr, raise --warmup-frac, or compute in float32; the checkpoints so "
            "far stay, but the same recipe would end here again"
        )


def update(run: RunState, sums: StepSums, lr: float, settings: TrainSettings) -> float:
    """Moves the weights by the step's mean gradient, shortened to `clip_norm`; returns its norm before that.

    A step whose loss or gradient is not finite moves nothing; DivergedError after `max_bad_steps` of them in a row.
    """
    _list_poisoned(run, sums.poisoned, settings.max_poisoned)
    parameters = list(run.drafter.parameters())
    for parameter in parameters:
        assert parameter.grad is not None, "every parameter of the drafter takes part"
        # One mean over the whole step. No supervised slot: the sums are zero, and so is the mean.
        parameter.grad /= sums.weight or 1.0
    grad_norm = float(nn.utils.clip_grad_norm_(parameters, settings.clip_norm))
    if math.isfinite(grad_norm) and math.isfinite(sums.loss):
        run.move(lr)
    else:
        _count_bad(run, sums, grad_norm, settings.max_bad_steps)
    run.optimizer.clear_gradients()
    return grad_norm


def _count_bad(run: RunState, sums: StepSums, grad_norm: float, max_bad_steps: int) -> None:
    run.position.num_bad += 1
    run.position.bad_in_a_row += 1
    if run.position.bad_in_a_row > max_bad_steps:
        raise DivergedError(
            f"step {run.position.step + 1}: loss {sums.loss}, gradient norm {grad_norm}, not finite for "
            f"{run.position.bad_in_a_row} steps in a row (--max-bad-steps {max_bad_steps}): lower --lr, raise "
            "--warmup-frac, or compute in float32; the checkpoints so far stay, but the same recipe would end here "
            "again"
        )


def _list_poisoned(run: RunState, found: Sequence[str], max_poisoned: int) -> None:
    """Names samples whose states are not finite, each once; PoisonedError where there are more than may be."""
    if new := sorted(set(found) - set(run.position.poisoned)):
        log.warning("the target's states of %s are not finite: nothing is learnt from them", ", ".join(new))
        run.position.poisoned += tuple(new)
    if len(run.position.poisoned) > max_poisoned:
        raise PoisonedError(
            f"step {run.position.step + 1}: the target's states of {len(run.position.poisoned)} samples are not finite "
            f"(--max-poisoned {max_poisoned}): {', '.join(run.position.poisoned[:5])}, …; give another "
            "--compute-dtype, or look at these samples with draftmill inspect"
        )
