"""Stacked local steps: all peers of one process trained as one batch, seen by each participant as its own trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.compress.payload import FloatArray
from peer.errors import ConfigError, LocalProtocolError
from peer.gossip.base import Algorithm
from peer.gossip.mixing import debiased_step_rate
from peer.run.setup import RunSetup
from peer.train.local_step import LocalStep
from peer.train.stacked import StackedStep, StackedTrainer


class StackedRows:
    """Computes the local steps of all peers, a group at a time, and hands each its row."""

    def __init__(self, setup: RunSetup) -> None:
        """Raises ConfigError if peers cannot be stacked."""
        config = setup.config
        if config.rounds.late == "skip":
            raise ConfigError(
                "cannot be used with --stacked, where all peers advance together", key="rounds.late", valid="wait"
            )
        if config.privacy.is_on:
            raise ConfigError("cannot be used with --stacked; leave that out", key="privacy")
        self.setup = setup
        self.trainer = StackedTrainer(
            setup.task,
            setup.training,
            rounds=config.run.rounds,
            seed=config.run.seed,
            shards=[setup.manifest.train[peer] for peer in range(setup.num_peers)],
            device=config.peer.device,
            base=setup.base,
        )
        self.algorithms: Sequence[Algorithm] = ()
        """Algorithms of all peers, whose models are read; to be set before the first round."""
        self._steps: dict[int, _GroupSteps] = {}
        """Group → its local steps, until the last of its peers has taken its own."""

    def row(self, peer: int) -> StackedRow:
        """Return the local steps of one peer."""
        return StackedRow(self, peer)

    def take(self, peer: int, t: int) -> LocalStep:
        """Return a peer's local steps of round t, once; the first peer of a group lets those of all be computed.

        All peers of the run are between two rounds then, or about to exchange messages of round t: nobody's model
        changes before its own steps are taken.
        """
        number = self.trainer.group_of(peer)
        group = self.trainer.groups[number]
        steps = self._steps.get(number)
        if steps is None:
            steps = self._steps[number] = _GroupSteps(t, self._compute(number, t), len(group))
        if steps.round != t:
            raise LocalProtocolError(f"the stack holds the local steps of round {steps.round}, not {t}")
        steps.left -= 1
        if steps.left == 0:
            del self._steps[number]
        row, result = peer - group.start, steps.result
        return LocalStep(result.gradients[row], float(result.losses[row]), result.samples)

    def _compute(self, number: int, t: int) -> StackedStep:
        group = self.trainer.groups[number]
        algorithms = self.algorithms[group.start : group.stop]
        models = np.empty((len(group), self.trainer.layout.size), dtype=np.float32)
        for row, algorithm in enumerate(algorithms):
            models[row] = algorithm.model()
        rate, guard = self.trainer.rate(t), self.setup.config.algorithm.push_weight_guard
        z_steps = np.array([debiased_step_rate(rate, algorithm.u, guard) for algorithm in algorithms])
        return self.trainer.gradients_of_group(number, models, t, z_steps)


@dataclass
class _GroupSteps:
    """The local steps of a group of peers, and the number of peers that have yet to take theirs."""

    round: int
    result: StackedStep
    left: int


class StackedRow:
    """One peer's view of the stack."""

    __slots__ = ("_peer", "_rows")

    def __init__(self, rows: StackedRows, peer: int) -> None:
        self._rows, self._peer = rows, peer

    def rate(self, t: int) -> float:
        """Return γ of round t."""
        return self._rows.trainer.rate(t)

    def gradient(self, z: FloatArray, t: int, rate: float, z_step: float) -> LocalStep:
        """Return the peer's row of the local steps of round t."""
        del z, rate, z_step  # `StackedRows` reads them for the whole group.
        return self._rows.take(self._peer, t)

    @property
    def needs_displacement(self) -> bool:
        """Whether `after_round` has anything to do."""
        return self._rows.trainer.needs_displacement

    def after_round(self, z_before: FloatArray, z_after: FloatArray, rate: float) -> None:
        """Let quasi-global momentum see how z moved."""
        self._rows.trainer.after_round_of_peer(self._peer, z_before, z_after, rate)

    def state(self) -> Mapping[str, npt.NDArray[Any]]:
        """Refuse: a stacked simulation has no checkpoints."""
        raise LocalProtocolError("stacked peers are not saved one by one")

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Refuse: a stacked simulation has no checkpoints."""
        raise LocalProtocolError("stacked peers are not restored one by one")
