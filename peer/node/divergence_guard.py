"""The divergence guard: conditions under which going on makes no sense, with reasons."""

from __future__ import annotations

import math

import numpy as np

from peer.compress.magnitude import max_magnitude
from peer.compress.payload import FloatArray
from peer.config.options import GuardOptions
from peer.errors import LOWER_RATE, DivergenceError
from peer.records import RoundRecord
from peer.wire.message import Message


def require_finite_loss(t: int, loss: float, *, is_misled: bool = False) -> float | None:
    """Return the loss of the local step of round t. Raises DivergenceError unless it is a number; where others moved
    the model unusually far (`plausibility`), returns None.

    To be called, like the next one, before anything of the step is sent. Neighbours refuse values that are not finite
    and close the link, so that they would never hear why this peer ends.
    """
    if math.isfinite(loss):
        return loss
    if not is_misled:
        raise DivergenceError(_loss_not_finite(t))
    return None


def require_finite_model(t: int, x: FloatArray) -> None:
    """Raise DivergenceError unless x: float[n] after the local step of round t holds numbers."""
    if not math.isfinite(max_magnitude(x)):
        raise DivergenceError(_model_not_finite(t))


def require_sendable(message: Message, excess: float | None) -> None:
    """Raise DivergenceError if a message holds numbers that others refuse: `excess` is the largest of them."""
    if excess is not None:
        raise DivergenceError(f"numbers up to {excess:.3g} were to be sent in round {message.round}; {LOWER_RATE}")


def reason_to_stop(
    options: GuardOptions, record: RoundRecord, model: FloatArray, *, is_misled: bool = False
) -> str | None:
    """Return why the run should stop after this round, as a sentence; None if all is well. `model: float[n]`, z.
    `is_misled`: whether others moved it unusually far (`plausibility`), so that the loss says nothing of the run."""
    if record.loss is not None and not math.isfinite(record.loss):
        return _loss_not_finite(record.round)
    if record.loss is not None and record.loss > options.max_loss and not is_misled:
        return (
            f"the training loss of round {record.round} is {record.loss:.3g}, above guard.max_loss "
            f"{options.max_loss:g}; {LOWER_RATE}"
        )
    if record.push_weight < options.min_push_weight:
        return (
            f"the push-sum weight fell to {record.push_weight:.3g}, below guard.min_push_weight "
            f"{options.min_push_weight:g}: this peer hears too little; check the graph and its links"
        )
    # One reduction answers for every coordinate. The square may overflow before they do, but no such model is worth
    # going on with.
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(model, model))
    if not math.isfinite(square):
        return _model_not_finite(record.round)
    distance = record.neighbor_distance
    if distance is not None and distance > options.max_neighbor_distance * max(1.0, math.sqrt(square)):
        return (
            f"the models of the neighbours are {distance:.3g} away after round {record.round}: consensus is lost; "
            f"lower algorithm.averaging_rate, or {LOWER_RATE}"
        )
    return None


def _loss_not_finite(t: int) -> str:
    return f"the training loss of round {t} is not finite; {LOWER_RATE}"


def _model_not_finite(t: int) -> str:
    return f"the model holds numbers that are not finite after round {t}; {LOWER_RATE}"
