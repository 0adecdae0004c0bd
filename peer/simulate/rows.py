"""Stacked local steps: all peers of one process trained as one batch, seen by each participant as its own trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.compress.payload import FloatArray
from peer.errors import ConfigError, LocalProtocolError
from peer.gossip.mixing import debiased_step_rate
from peer.run_setup import RunSetup
from peer.train.stacked import StackedStep, StackedTrainer


@dataclass(frozen=True)
class _RowStep:
    gradient: FloatArray
    loss: float
    samples: int


class StackedRows:
    """Computes the local steps of all peers at once and hands each its row."""

    def __init__(self, setup: RunSetup) -> None:
        """Raises ConfigError where peers cannot be stacked."""
        config = setup.config
        if config.rounds.late == "skip":
            raise ConfigError(
                "cannot be used with --stacked, where all peers advance together", key="rounds.late", valid="wait"
            )
        self.setup = setup
        self.trainer = StackedTrainer(
            setup.task,
            setup.training,
            rounds=config.run.rounds,
            seed=config.run.seed,
            shards=[setup.manifest.train[peer] for peer in range(setup.num_peers)],
            holdouts=[setup.manifest.holdout[peer] for peer in range(setup.num_peers)],
            device=config.peer.device,
            base=setup.base,
        )
        self.ready_at = [0.0] * setup.num_peers
        """When each peer finished its last round, in virtual seconds."""
        self.step: StackedStep | None = None
        self.computed = -1
        """The round that `step` belongs to."""
        shape = (setup.num_peers, self.trainer.layout.size)
        self._models = np.empty(shape, dtype=np.float32)
        self._before = np.empty(shape, dtype=np.float32) if self.trainer.needs_displacement else None
        self._after = np.empty_like(self._models) if self.trainer.needs_displacement else None
        self._displaced = 0

    def row(self, peer: int) -> StackedRow:
        """Return the local steps of one peer."""
        return StackedRow(self, peer)

    def compute(self, models: Sequence[FloatArray], push_weights: Sequence[float], guard: float, t: int) -> None:
        """Compute the local steps of round t for all peers."""
        for peer, z in enumerate(models):
            self._models[peer] = z
        rate = self.trainer.rate(t)
        z_steps = [debiased_step_rate(rate, u, guard) for u in push_weights]
        self.step = self.trainer.gradients(self._models, t, np.array(z_steps))
        self.computed = t

    def displaced(self, peer: int, z_before: FloatArray, z_after: FloatArray, rate: float) -> None:
        """Take note of how one peer's model moved; the momentum moves on when all have."""
        assert self._before is not None
        assert self._after is not None
        self._before[peer], self._after[peer] = z_before, z_after
        self._displaced += 1
        if self._displaced == self.setup.num_peers:
            self.trainer.after_round(self._before, self._after, rate)
            self._displaced = 0


class StackedRow:
    """One peer's view of the stack."""

    def __init__(self, rows: StackedRows, peer: int) -> None:
        self._rows, self._peer = rows, peer

    def rate(self, t: int) -> float:
        """Return γ of round t."""
        return self._rows.trainer.rate(t)

    def gradient(self, z: FloatArray, t: int, rate: float, z_step: float) -> _RowStep:
        """Return the peer's row of the local steps of round t."""
        del z, rate, z_step  # `StackedRows.compute` was given them.
        step = self._rows.step
        if step is None or self._rows.computed != t:
            raise LocalProtocolError(f"the stack holds the local steps of round {self._rows.computed}, not {t}")
        return _RowStep(step.gradients[self._peer], float(step.losses[self._peer]), step.samples)

    @property
    def needs_displacement(self) -> bool:
        """Whether `after_round` has anything to do."""
        return self._rows.trainer.needs_displacement

    def after_round(self, z_before: FloatArray, z_after: FloatArray, rate: float) -> None:
        """Let quasi-global momentum see how z moved."""
        self._rows.displaced(self._peer, z_before, z_after, rate)

    def state(self) -> Mapping[str, npt.NDArray[Any]]:
        """Refuse: a stacked simulation has no checkpoints."""
        raise LocalProtocolError("stacked peers are not saved one by one")

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Refuse: a stacked simulation has no checkpoints."""
        raise LocalProtocolError("stacked peers are not restored one by one")
