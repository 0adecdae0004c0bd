"""A local step that costs microseconds: each peer pulls a small model toward a point of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.compress.payload import FloatArray
from tests.node.local_steps import Step

RATE = 0.05
_MOMENTUM = 0.8
_NOISE = 0.2
_PULL = 0.5


class VirtualTraining:
    """Implements `participant.LocalSteps`. The gradient is that of ½ |z − target|², with noise and momentum, so that
    there is a state which a crash must not lose."""

    def __init__(
        self,
        size: int,
        rounds: int,
        *,
        seed: int,
        peer: int,
        quasi_global: bool,
        on_step: Callable[[int, float, FloatArray], None],
    ) -> None:
        """`quasi_global`: the momentum follows what the whole round moved the model, not the own gradients.
        `on_step(round, rate, gradient)` is told of every step."""
        random = np.random.Generator(np.random.Philox([seed, peer]))
        self._target = random.normal(size=size).astype(np.float32)
        self._noise = (_NOISE * random.normal(size=(rounds, size))).astype(np.float32)
        self._velocity = np.zeros(size, np.float32)
        self._quasi_global = quasi_global
        self._on_step = on_step

    def scale(self, unit: np.float32) -> None:
        """Measure the target, and the noise, in another unit."""
        self._target, self._noise = unit * self._target, unit * self._noise

    @property
    def needs_displacement(self) -> bool:
        return self._quasi_global

    def rate(self, t: int) -> float:
        return RATE

    def gradient(self, z: FloatArray, t: int, rate: float, z_step: float) -> Step:
        away = z - self._target
        gradient: FloatArray = np.float32(_PULL) * away + self._noise[t] + np.float32(_MOMENTUM) * self._velocity
        if not self._quasi_global:
            self._velocity = gradient
        self._on_step(t, rate, gradient)
        return Step(gradient, float(np.dot(away, away)))

    def after_round(self, z_before: FloatArray, z_after: FloatArray, rate: float) -> None:
        if rate == 0.0:
            return
        moved = (z_before - z_after) / np.float32(rate)
        self._velocity = (_MOMENTUM * self._velocity + (1.0 - _MOMENTUM) * moved).astype(np.float32)

    def state(self) -> Mapping[str, npt.NDArray[Any]]:
        return {"velocity": self._velocity}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self._velocity = np.array(state["velocity"], dtype=np.float32, copy=True)
