"""Choice of the fastest precision for a model on this machine, measured by a few training steps.

The steps of all precisions take turns, so that other work on the machine slows them all, and the medians are compared.
On a CPU, where torch computes in the calling thread, the processor time of that thread counts: in wall time, other
peers that start on the machine would decide. Nothing of the measured trainers stays.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from peer.config.precision_choice import PRECISIONS, Precision, PrecisionChoice
from peer.errors import SottoError
from peer.train.local_step import Trainer

log = logging.getLogger("sotto")

_WARM_UP = 2
"""The first step allocates memory, and that of a network in 8 bits measures its ranges."""
_LEAST_TURNS, _MOST_TURNS = 3, 99
_ENOUGH_TURNS, _ENOUGH_S = 9, 0.5
"""Turns that are enough after so many seconds: those of small models are disturbed most, and cost least."""
_AT_MOST_S = 5.0
"""Time after which no further turn begins once there were `_LEAST_TURNS`."""

_COMMON: Precision = "float32"
"""Every model can compute in it."""


def fastest(open_trainer: Callable[[Precision], Trainer]) -> PrecisionChoice:
    """Return the precision in which a training step takes least time.

    `open_trainer` returns a new trainer of the task that computes in a precision; it raises SottoError for one in which
    the model cannot compute, as does its first step. Such a precision is left out, and so is one in which the loss is
    not finite or the model starts from other parameters. Raises the errors of the trainer in float32.
    """
    common = open_trainer(_COMMON)
    steps = {_COMMON: _step_of(common)}
    for precision in PRECISIONS:
        if precision == _COMMON or (precision == "bfloat16" and not _has_bfloat16(common.device)):
            continue
        try:
            trainer = open_trainer(precision)
            step = _step_of(trainer)
            loss = step(0)
        except SottoError as error:
            log.info("precision %s is left out: %s", precision, error)
            continue
        if not _starts_alike(trainer, common) or loss is None or not np.isfinite(loss):
            log.warning("precision %s is left out: it starts from another model, or its loss is not finite", precision)
            continue
        steps[precision] = step
    return choose(steps, time.perf_counter if common.device.type == "cuda" else time.thread_time)


def choose(steps: Mapping[Precision, Callable[[int], object]], clock: Callable[[], float]) -> PrecisionChoice:
    """Return the precision whose `steps[precision](turn)` takes least time by `clock`, in seconds, median of turns. The
    first of equals wins."""
    for step in steps.values():
        for turn in range(_WARM_UP):
            step(turn)
    taken: dict[Precision, list[float]] = {precision: [] for precision in steps}
    order, began = list(steps), clock()
    for turn in range(_MOST_TURNS):
        if turn >= _LEAST_TURNS and clock() - began > (_ENOUGH_S if turn >= _ENOUGH_TURNS else _AT_MOST_S):
            break
        for precision in order:
            before = clock()
            steps[precision](turn)
            taken[precision].append(clock() - before)
        # The first in a turn finds other caches than the last.
        order = order[1:] + order[:1]
    medians = {precision: statistics.median(seconds) for precision, seconds in taken.items()}
    return PrecisionChoice(min(medians, key=medians.__getitem__), medians)


def _step_of(trainer: Trainer) -> Callable[[int], float | None]:
    """Return a gradient step of a trainer at its start, as a function of the round, which returns the loss."""
    z = trainer.initial_vector()

    def step(turn: int) -> float | None:
        return trainer.gradient(z, turn, 0.0, 0.0).loss

    return step


def _starts_alike(one: Trainer, other: Trainer) -> bool:
    return one.layout == other.layout and np.array_equal(one.initial_vector(), other.initial_vector())


def _has_bfloat16(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.is_bf16_supported()
