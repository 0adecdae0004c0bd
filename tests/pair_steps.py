"""Local steps for tests of peers that exchange in pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.compress.payload import FloatArray

SIZES = [3, 5]
"""Of the layers."""


@dataclass
class Step:
    gradient: FloatArray
    loss: float = 1.0
    samples: int = 1


class Pull:
    """Local steps that pull toward a target, with a momentum to be saved."""

    needs_displacement = False

    def __init__(self, target: float) -> None:
        self.target = target
        self.momentum = np.zeros(sum(SIZES), np.float32)

    def rate(self, t: int) -> float:
        return 0.25

    def gradient(self, z: FloatArray, t: int, rate: float, z_step: float) -> Step:
        self.momentum += z - np.float32(self.target)
        return Step(self.momentum)

    def after_round(self, z_before: FloatArray, z_after: FloatArray, rate: float) -> None:
        raise AssertionError("there are no rounds")

    def state(self) -> Mapping[str, npt.NDArray[Any]]:
        return {"m": self.momentum}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self.momentum[:] = state["m"]
