"""Drift correction: each peer learns how its own gradients differ from the mean of all peers' gradients.

A gradient that always pulls a peer the same way, as that of its own labels does, keeps the peer at a distance from the
others at which averaging pulls back as strongly. That pull is therefore the difference from the mean gradient, and
every peer sees it in its own model. Summed up and taken out of the gradient, it lets the distance go to 0, and no byte
is sent for it: integral control. Whole messages on undirected graphs: Shi et al. 2015 (EXTRA). Compressed: Liu et al.
2021 (LEAD).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.compress.payload import FloatArray, Kept
from peer.gossip.mixing import add_scaled_, restored_like

_PART_OF_GAP = 1 / 6
_MOST_OF_GAP = 0.08
"""A larger gap counts as this one: on such graphs not the graph limits β but the lag of compressed copies."""
_CORRECTION, _NUMBERS = "drift.correction", "drift.gain_and_rate"


def default_gain(averaging_rate: float, spectral_gap: float) -> float:
    """Return a gain β that leaves the rounds stable: a sixth of η (1 − ρ), at most η / 75, to two digits.

    Without compression the peers follow s² + ηλ (1 + β) s + βηλ = 0 for each eigenvalue λ ≠ 0 of I − W; on a directed
    ring both roots lie left of 0 as long as β is below about η Re λ, which is at least η (1 − ρ). Compressed copies
    lag: with half of η (1 − ρ), digits was well, and ResNet-20 on CIFAR-10 diverged.
    """
    return float(f"{_PART_OF_GAP * averaging_rate * min(max(0.0, spectral_gap), _MOST_OF_GAP):.2g}")


class DriftCorrection:
    """s of one peer, in the units of its gradients.

    The peer steps by −γ (g − s). After each round s ← s + (β / γ) d, where d is how averaging has moved it.
    """

    def __init__(self, x: FloatArray, gain: float) -> None:
        """Start at zeros like `x`. `gain` is β."""
        self._gain = gain
        self._correction = np.zeros_like(x)
        self._rate = 0.0
        """γ of the latest local step."""

    def step_(self, x: FloatArray, rate: float) -> None:
        """Add γ s to `x`: the part of a local step at the rate γ that makes up for drift."""
        self._rate = rate
        if rate > 0.0:
            add_scaled_(x, rate, self._correction)

    def learn_(self, movement: Kept, scale: float = 1.0) -> None:
        """Note that averaging has moved the peer by `scale · movement`. Without local steps it says nothing of
        gradients."""
        if self._rate > 0.0:
            add_scaled_(self._correction, self._gain * scale / self._rate, movement)

    def reset(self, gain: float) -> None:
        """Begin anew with another β. Σ s is 0 over those who began together, so that all members have to do it at
        once."""
        self._gain = gain
        self._correction.fill(0)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return the state that must survive a crash, as named arrays."""
        return {_CORRECTION: self._correction, _NUMBERS: np.array([self._gain, self._rate])}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a result of `state`. A state without a correction is of a run that began without: it starts here."""
        if _CORRECTION in state:
            self._correction = restored_like(self._correction, state[_CORRECTION])
            self._gain, self._rate = map(float, state[_NUMBERS])
