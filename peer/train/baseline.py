"""One process trained on all the data: what a run without a server is measured against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from peer.config.options import TrainingOptions
from peer.train.evaluation import Evaluation
from peer.train.local_step import Trainer, Vector
from peer.train.task import Task


@dataclass(frozen=True)
class Baseline:
    """The result of one process."""

    evaluation: Evaluation
    """Evaluation on the common test set, after the last step."""
    losses: tuple[float, ...]
    """Training loss of every round."""
    z: Vector
    """The trained vector, float32[n]."""


def single_process(
    task: Task,
    options: TrainingOptions,
    *,
    rounds: int,
    seed: int,
    batch_size: int | None = None,
    device: str = "cpu",
    base: Path | None = None,
    tell: Callable[[], None] = lambda: None,
) -> Baseline:
    """Train one process on the whole training set, hold-outs included, and return the result. `tell` is called after
    each round.

    It starts where the peers start and takes the same number of steps with the same schedule, momentum and, unless
    `batch_size` is given, batch size; so it sees as many samples as one peer does. `batch_size` times the number of
    peers would give it as many as all of them, with steps of less noise.
    """
    # Adjustment and balance are about classes that a peer lacks.
    changes: dict[str, object] = {"label_adjustment": False, "class_balance": 0.0}
    if batch_size is not None:
        changes["batch_size"] = batch_size
    options = options.model_copy(update=changes)
    everything = np.arange(len(task.train_data()), dtype=np.int64)
    trainer = Trainer(
        task, options, rounds=rounds, seed=seed, peer=0, train_indices=everything, device=device, base=base
    )
    z, losses = trainer.initial_vector(), []
    for t in range(rounds):
        rate = trainer.rate(t)
        step = trainer.gradient(z, t, rate, rate)
        before, z = z, z - np.float32(rate) * step.gradient
        trainer.after_round(before, z, rate)
        assert step.loss is not None
        losses.append(step.loss)
        tell()
    return Baseline(trainer.evaluate(z), tuple(losses), z)
