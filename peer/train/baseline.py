"""One process trained on all the data: what a run without a server is measured against."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from peer.config.options import TrainingOptions
from peer.train.evaluation import Evaluation
from peer.train.local_step import Trainer, Vector
from peer.train.task import Task


def single_process(
    task: Task,
    options: TrainingOptions,
    *,
    rounds: int,
    seed: int,
    device: str = "cpu",
    base: Path | None = None,
    tell: Callable[[], None] = lambda: None,
) -> tuple[Evaluation, Vector]:
    """Train one process on the whole training set, hold-outs included; return its evaluation on the common test set
    after the last step, and the trained vector, float32[n]. `tell` is called after each round.

    It starts where the peers start and takes the same number of steps with the same schedule and momentum. With the
    peers' batch size it sees as many samples as one of them does; with that of all together as many as all of them, in
    steps of less noise.
    """
    # Adjustment and balance are about classes that a peer lacks.
    options = options.model_copy(update={"label_adjustment": False, "class_balance": 0.0})
    everything = np.arange(len(task.train_data()), dtype=np.int64)
    trainer = Trainer(
        task, options, rounds=rounds, seed=seed, peer=0, train_indices=everything, device=device, base=base
    )
    z = trainer.initial_vector()
    for t in range(rounds):
        rate = trainer.rate(t)
        step = trainer.gradient(z, t, rate, rate)
        before, z = z, z - np.float32(rate) * step.gradient
        trainer.after_round(before, z, rate)
        tell()
    return trainer.evaluate(z), z
