"""1-bit signs with a common magnitude (Bernstein et al. 2018, with the scale of Karimireddy et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from peer.compress.base import Draws, ErrorBound
from peer.compress.levels import checked_scale
from peer.compress.norms import sum_of_magnitudes
from peer.compress.payload import FloatArray, Levels


@dataclass(frozen=True, kw_only=True)
class Sign:
    """Sends ± mean |v| of the layer; v ≥ 0, −0.0 included, gives +."""

    kind: ClassVar[str] = "sign"
    summary: ClassVar[str] = "the sign of each value times the layer's mean magnitude, 1 bit; biased"
    unbiased: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False

    def compress(self, v: FloatArray, layer: int, draws: Draws) -> Levels:
        """Return the signs of `v` and its mean magnitude (a fixed-order sum, see `norms`)."""
        scale = checked_scale(sum_of_magnitudes(v) / v.size, 1, v.dtype, layer)
        return Levels(scale, divisor=1, base=-1, step=2, bits=1, codes=(v >= 0).view(np.uint8))

    def bits_per_value(self, size: int) -> float:
        return 1.0

    def error_bound(self, size: int) -> ErrorBound:
        # ‖C(v) − v‖² = ‖v‖² − ‖v‖₁²/d, and ‖v‖₁ ≥ ‖v‖₂.
        return ErrorBound(contraction=1.0 / size)
