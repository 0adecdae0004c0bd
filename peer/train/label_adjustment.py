"""Logit adjustment: a local step that knows the class shares of its peer's samples.

A peer with skewed data first learns which classes it has, and carries that into all models. Here it trains on

    −log( r_y e^{f_y} / Σ_c r_c e^{f_c} ),    r_c = q_c / p_c,

where q_c is the share of class c in the peer's samples and p_c its share in the whole training set. The effect of the
peer's own shares is given, and f learns the rest: it is evaluated and exported as it is, for data whose classes have
the shares p. Every peer computes p from the labels that are dealt, so nothing is told to others. Where data is not
dealt, p is declared (`declared_shares`), or the mean of the devices' reports (`mean_shares`).

For classes that the peer does not have, r_c is 1: they are the others that its samples are told from, as in the plain
loss. By the equation they would stay out of the sum, and then a peer with one class learns nothing (digits, skew 1, 400
rounds of sgp, two seeds, worst peer: 72.8 and 63.9 % without them in the sum, 96.9 and 95.3 % with r_c = 1, 96.9 and
96.4 % by the plain loss).

After Menon et al., "Long-tail learning via logit adjustment" (2021), and Zhang et al., "Federated learning with label
distribution skew via logits calibration" (2022), which leave p out: the same where all classes are equally frequent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from peer.config.options import TrainingOptions, Vote
from peer.errors import ConfigError
from peer.train.data import Batch, Classification
from peer.train.own_task import inner_task
from peer.train.sampling import BatchSchedule, ClassQuotas, IntArray, augmentation_uniforms
from peer.train.task import Data, Task

Float64Array: TypeAlias = npt.NDArray[np.float64]
Loss: TypeAlias = Callable[[torch.nn.Module, Batch], torch.Tensor]

_DOUBT = 10.0
"""x in `is_uneven`: a shard that was dealt at random counts as uneven with a probability of at most e^−x."""
_MOST_VOTED = 10_000
"""Shares of more classes, with a proof behind them, might not fit into a note."""


class AdjustableTask(Task, Protocol):
    """A task with classes whose loss takes numbers to add to the logits."""

    def adjusted_loss(self, model: torch.nn.Module, batch: Batch, adjustment: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch with `adjustment: float32[b, num_classes]` added to the logits."""
        ...


class LabelAdjustment:
    """Addend of the logits of each sample that a peer draws: log r_c, 0 for classes that it does not have."""

    def __init__(self, schedule: BatchSchedule, quotas: ClassQuotas, shares: Float64Array) -> None:
        """`quotas` are those of the schedule, `shares: float64[classes]` is p."""
        self._schedule, self._quotas, self._shares = schedule, quotas, shares
        self._number, self._log_ratios = -1, np.empty(0, np.float32)

    def rows(self, step: int) -> npt.NDArray[np.float32]:
        """Return float32[b, classes] for the batch of a step."""
        return np.stack([self._of_pass(number) for number in self._schedule.passes(step).tolist()])

    def _of_pass(self, number: int) -> npt.NDArray[np.float32]:
        """Return log r_c of a pass, float32[classes]; the last one asked for is kept."""
        if number != self._number:
            drawn = self._quotas.of_pass(number)
            log_ratios = np.zeros(len(drawn))
            has = drawn > 0
            log_ratios[has] = np.log(drawn[has] / drawn.sum()) - np.log(self._shares[has])
            self._number, self._log_ratios = number, log_ratios.astype(np.float32)
        return self._log_ratios


def deal_locally(
    task: Task,
    options: TrainingOptions,
    indices: IntArray,
    rate: Callable[[int], float],
    *,
    seed: int,
    peer: int,
    shares: Float64Array | None = None,
    totals: IntArray | None = None,
) -> tuple[BatchSchedule, LabelAdjustment | None]:
    """Return how a peer draws its samples at `indices` of the training set, and its addend to logits, if any.

    `shares` is p, where the training set is not that of all peers. `totals` is `count_classes`, for callers that deal
    to many peers. Raises ConfigError (`training.class_balance`, `training.label_adjustment`) where the options ask for
    more than the task can do, and (`data.class_shares`) where `shares` does not fit the samples; DataError where there
    are none.
    """
    data, wanted, alpha = task.train_data(), options.label_adjustment, options.class_balance
    if not task.num_classes:
        if alpha > 0:
            raise ConfigError(f"task {task.name} has no classes", key="training.class_balance", value=alpha, valid="0")
        if wanted is True:
            raise _not_adjustable(task)
        return BatchSchedule(indices, options.batch_size, seed=seed, peer=peer), None
    labels = data.labels.numpy()
    quotas = ClassQuotas(labels[indices], task.num_classes, balance=_balance(options, len(indices), rate))
    schedule = BatchSchedule(indices, options.batch_size, seed=seed, peer=peer, quotas=quotas if alpha > 0 else None)
    if shares is None:
        totals = count_classes(task) if totals is None else totals
        shares, uneven = totals / totals.sum(), is_uneven(quotas.counts, totals)
    else:
        uneven = _differ_from(shares, quotas.counts)
    if not wanted or (wanted == "auto" and alpha == 0 and not uneven):
        return schedule, None
    if can_adjust(task) and _targets_are_labels(task, data, schedule, seed):
        return schedule, LabelAdjustment(schedule, quotas, shares)
    if wanted is True:
        raise _not_adjustable(task)
    return schedule, None


def count_classes(task: Task) -> IntArray:
    """Return how many samples of each class the training set has, int64[classes]."""
    return np.bincount(task.train_data().labels.numpy(), minlength=task.num_classes).astype(np.int64)


def can_adjust(task: Task) -> TypeGuard[AdjustableTask]:
    """Return whether a task has an `adjusted_loss`: that of `Classification` belongs to its `loss` and to no other."""
    own = inner_task(task)
    adjusted = getattr(own, "adjusted_loss", None)
    if not task.num_classes or not callable(adjusted):
        return False
    inherited = getattr(adjusted, "__func__", None) is Classification.adjusted_loss
    return not inherited or getattr(own.loss, "__func__", None) is Classification.loss


def training_loss(task: Task, *, adjusted: bool) -> Loss:
    """Return the loss that the local step differentiates; an adjusted one takes the rows of `LabelAdjustment` after
    the targets of its batches."""
    if not adjusted:
        return task.loss
    assert can_adjust(task)
    adjustable = task
    return lambda model, batch: adjustable.adjusted_loss(model, batch[:-1], batch[-1])


def is_uneven(counts: IntArray, totals: IntArray) -> bool:
    """Return whether a shard with `counts: int64[classes]` was hardly dealt at random from a training set with
    `totals: int64[classes]`."""
    m, all_samples = int(counts.sum()), int(totals.sum())
    if m >= all_samples:
        return False
    # Samples are dealt without replacement, which leaves counts less room the more of them a shard has.
    room = (all_samples - m) / (all_samples - 1)
    present = totals > 0
    return _exceeds_chance(counts[present], m * totals[present] / all_samples, room)


def declared_shares(task: Task, declared: Sequence[float] | Vote) -> Float64Array | None:
    """Return p where no device knows the labels of all: what `data.class_shares` declares, in any unit, or equal shares
    where it is empty; None where the task has no classes, or the devices are still to vote. Raises ConfigError where it
    does not fit the task."""
    num_classes, key = task.num_classes, "data.class_shares"
    if not declared:
        return np.full(num_classes, 1.0 / num_classes) if num_classes else None
    if not num_classes:
        value = declared if isinstance(declared, str) else list(declared)
        raise ConfigError(f"task {task.name} has no classes", key=key, value=value, valid="an empty list")
    if isinstance(declared, str):
        if num_classes > _MOST_VOTED:
            problem = f"task {task.name} has {num_classes} classes, too many to tell in one note; declare the shares"
            raise ConfigError(problem, key=key, value=declared, valid=f"at most {_MOST_VOTED} classes")
        return None
    if len(declared) != num_classes or not 0.0 < sum(declared) < math.inf:
        valid = f"{num_classes} numbers of at least 0, not all 0"
        problem = f"task {task.name} has {num_classes} classes"
        raise ConfigError(problem, key=key, value=list(declared), valid=valid)
    return np.array(declared, np.float64) / sum(declared)


def mean_shares(shares: Sequence[Sequence[int]], weights: Sequence[int]) -> Float64Array:
    """Return p where each device says how frequent the classes are in its own data: float64[classes] of the shares of
    each, in any unit, and the weights of the devices."""
    told = np.array(shares, np.float64)
    return np.average(told / told.sum(axis=1, keepdims=True), axis=0, weights=np.array(weights, np.float64))


def _differ_from(shares: Float64Array, counts: IntArray) -> bool:
    """Return whether `counts: int64[classes]` differ from `shares: float64[classes]` by more than chance. Raises
    ConfigError for samples of a class that has no share."""
    present = shares > 0
    if counts[~present].any():
        number = int(np.flatnonzero(~present & (counts > 0))[0])
        raise ConfigError(
            f"is 0 for class {number}, but this device has {counts[number]} samples of it",
            key="data.class_shares",
        )
    return _exceeds_chance(counts[present], counts.sum() * shares[present], 1.0)


def _exceeds_chance(counts: IntArray, expected: Float64Array, room: float) -> bool:
    """Return whether Pearson's X² / `room` is above k + 2√(kx) + 2x, where k is its degrees of freedom.

    A χ² variable is above that with a probability of at most e^−x (Laurent and Massart 2000, lemma 1).
    """
    statistic = float((np.square(counts - expected) / expected).sum()) / room
    freedom = len(counts) - 1
    return statistic > freedom + 2 * math.sqrt(freedom * _DOUBT) + 2 * _DOUBT


def _balance(options: TrainingOptions, size: int, rate: Callable[[int], float]) -> float | Callable[[int], float]:
    """Return α, or where it falls with γ a function from the number of a pass over `size` samples to its α."""
    alpha = options.class_balance
    if not options.class_balance_follows_rate:
        return alpha

    def of_pass(number: int) -> float:
        t = number * size // (options.batch_size * options.local_steps)
        # A low γ of the warm-up is no reason to balance less.
        return alpha if t < options.warmup_rounds else alpha * rate(t) / options.learning_rate

    return of_pass


def _targets_are_labels(task: Task, data: Data, schedule: BatchSchedule, seed: int) -> bool:
    """Return whether the targets of the first batch, augmented as in training, are its labels; soft ones are not."""
    draw = schedule.batch(0)
    chosen = torch.from_numpy(draw.indices)
    uniforms = torch.from_numpy(augmentation_uniforms(seed, draw, len(data)))
    targets = task.augment(data.batch(chosen), uniforms)[-1]
    return targets.dtype == torch.int64 and torch.equal(targets.cpu(), data.labels[chosen])


def _not_adjustable(task: Task) -> ConfigError:
    return ConfigError(
        f"the loss of task {task.name} takes nothing to add to the logits of its classes (docs/own-task.md)",
        key="training.label_adjustment",
        value=True,
        valid='"auto", false',
    )
