"""Stacked local steps: all peers of one process trained as one batch, seen by each participant as its own trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.compress.payload import FloatArray
from peer.errors import ConfigError, LocalProtocolError
from peer.job import Job
from peer.train.local_step import learning_rates, make_momentum
from peer.train.stacked import StackedTrainer


@dataclass(frozen=True)
class _RowStep:
    gradient: FloatArray
    loss: float
    samples: int


class StackedRows:
    """Computes the gradients of all peers at once and hands each its row."""

    def __init__(self, job: Job, x0: FloatArray) -> None:
        """Raises ConfigError where peers cannot be stacked."""
        config = job.config
        if config.rounds.late == "skip":
            raise ConfigError(
                "stacked peers go through rounds together and never skip", key="rounds.late", valid="wait"
            )
        if config.training.local_steps != 1:
            raise ConfigError(
                "stacked peers take one local step a round",
                key="training.local_steps",
                value=config.training.local_steps,
                valid="1",
            )
        self.job = job
        self.trainer = StackedTrainer(
            job.task,
            config.training,
            seed=config.run.seed,
            partitions=job.manifest.train,
            device=config.peer.device,
            base=job.base,
        )
        self.ready_at = [0.0] * job.num_peers
        self.stack = np.empty((job.num_peers, x0.size), dtype=np.float32)
        self.gradients: npt.NDArray[np.float32] = np.empty_like(self.stack)
        self.losses: npt.NDArray[np.float32] = np.zeros(job.num_peers, dtype=np.float32)
        self.computed = -1

    def row(self, peer: int) -> StackedRow:
        """Return the local steps of one peer."""
        return StackedRow(self, peer)

    def compute(self, models: Sequence[FloatArray], t: int) -> None:
        """Compute the plain gradients of round t for all peers."""
        for peer, z in enumerate(models):
            self.stack[peer] = z
        self.gradients, self.losses = self.trainer.gradients(self.stack, t)
        self.computed = t


class StackedRow:
    """One peer's view of the stack; its momentum is its own."""

    def __init__(self, rows: StackedRows, peer: int) -> None:
        self._rows, self._peer = rows, peer
        options = rows.job.config.training
        self._batch_size = options.batch_size
        self._rates = learning_rates(options, rows.job.config.run.rounds)
        self._momentum = make_momentum(options)

    def rate(self, t: int) -> float:
        """Return γ of round t."""
        return self._rates.rate(t)

    def gradient(self, z: FloatArray, t: int, rate: float, z_step: float) -> _RowStep:
        """Return the peer's row of the gradients of round t, momentum and weight decay included."""
        del rate, z_step  # One local step: z does not move within the round.
        if self._rows.computed != t:
            raise LocalProtocolError(f"the stack holds the gradients of round {self._rows.computed}, not {t}")
        direction = self._momentum.direction(self._rows.gradients[self._peer], z)
        return _RowStep(direction, float(self._rows.losses[self._peer]), self._batch_size)

    @property
    def needs_displacement(self) -> bool:
        """Whether `after_round` has anything to do."""
        return self._momentum.needs_round

    def after_round(self, z_before: FloatArray, z_after: FloatArray, rate: float) -> None:
        """Let quasi-global momentum see how z moved."""
        self._momentum.after_round(z_before, z_after, rate)

    def state(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return the momentum."""
        return self._momentum.state()

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take back what `state` returned."""
        self._momentum.restore(dict(state))
