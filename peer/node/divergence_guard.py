"""The divergence guard: when going on makes no sense, and why."""

from __future__ import annotations

import math

import numpy as np

from peer.compress.payload import FloatArray
from peer.config import GuardOptions
from peer.round_record import RoundRecord


def reason_to_stop(options: GuardOptions, record: RoundRecord, model: FloatArray) -> str | None:
    """Return why the run should stop after this round, as a sentence; None if all is well. `model: float[n]`, z."""
    if record.loss is not None and not math.isfinite(record.loss):
        return f"the training loss of round {record.round} is not finite; lower training.learning_rate"
    if record.loss is not None and record.loss > options.max_loss:
        return (
            f"the training loss of round {record.round} is {record.loss:.3g}, above guard.max_loss "
            f"{options.max_loss:g}; lower training.learning_rate"
        )
    if record.push_weight < options.min_push_weight:
        return (
            f"the push-sum weight fell to {record.push_weight:.3g}, below guard.min_push_weight "
            f"{options.min_push_weight:g}: this peer hears too little; check the graph and its links"
        )
    # One reduction answers for every coordinate: a sum is finite only if all its terms are (or it overflowed).
    square = float(np.dot(model, model))
    if not math.isfinite(square):
        return f"the model holds numbers that are not finite after round {record.round}; lower training.learning_rate"
    distance = record.neighbor_distance
    if distance is not None and distance > options.max_neighbor_distance * max(1.0, math.sqrt(square)):
        return (
            f"the models of the neighbours are {distance:.3g} away after round {record.round}: consensus is lost; "
            "lower algorithm.averaging_rate or training.learning_rate"
        )
    return None
