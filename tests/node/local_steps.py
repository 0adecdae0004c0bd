"""Local steps for tests that train nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.compress.payload import FloatArray
from peer.node.disk_state import model_digest
from peer.node.local_steps import RecordedSteps
from peer.protocol import OLDEST

SIZES = [3, 5]
"""Of the layers of `Pull`."""


@dataclass
class Step:
    gradient: FloatArray
    loss: float = 1.0
    samples: int = 1


class KeptSteps:
    """What all such local steps have in common: one array is their whole state."""

    needs_displacement = False

    def __init__(self, kept: npt.NDArray[Any]) -> None:
        self.kept = kept

    def gradient(self, z: FloatArray, t: int, rate: float, z_step: float) -> Step:
        raise NotImplementedError

    def after_round(self, z_before: FloatArray, z_after: FloatArray, rate: float) -> None:
        raise AssertionError("not wanted")

    def state(self) -> Mapping[str, npt.NDArray[Any]]:
        return {"kept": self.kept}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self.kept[:] = state["kept"]


class OfScript(KeptSteps, RecordedSteps):
    """Mixed into such steps: a script does them, and repeats those since the checkpoint."""

    records_all = False
    record_needs = OLDEST
    _recalled: Mapping[str, npt.NDArray[Any]] = {}
    _gradient: FloatArray

    def gradient(self, z: FloatArray, t: int, rate: float, z_step: float) -> Step:
        recalled, self._recalled = self._recalled, {}
        if "kept" in recalled:
            self.kept[:], self._gradient = recalled["kept"], recalled["gradient"]
        else:
            self._gradient = super().gradient(z, t, rate, z_step).gradient
            if recalled and recalled["digest"][0] != model_digest(self._gradient):
                self.differs = self.records_all = True
        return Step(self._gradient)

    def record(self) -> Mapping[str, npt.NDArray[Any]]:
        if not self.records_all:
            return {"digest": np.array([model_digest(self._gradient)], np.uint64)}
        return {"kept": self.kept.copy(), "gradient": self._gradient.copy()}

    def recall(self, record: Mapping[str, npt.NDArray[Any]]) -> None:
        self._recalled = record


class Pull(KeptSteps):
    """Pull toward a target, with a momentum to be saved."""

    def __init__(self, target: float) -> None:
        super().__init__(np.zeros(sum(SIZES), np.float32))
        self.target = target

    def rate(self, t: int) -> float:
        return 0.25

    def gradient(self, z: FloatArray, t: int, rate: float, z_step: float) -> Step:
        self.kept += z - np.float32(self.target)
        return Step(self.kept)
