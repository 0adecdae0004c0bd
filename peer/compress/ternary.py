"""Ternary values (Wen et al., "TernGrad", NIPS 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from peer.compress.base import Draws, ErrorBound, own_uniforms
from peer.compress.levels import checked_scale, stochastic_codes
from peer.compress.magnitude import max_magnitude
from peer.compress.payload import FloatArray, Levels


@dataclass(frozen=True, kw_only=True)
class Ternary:
    """Sends sign(v) · max |v| with probability |v| / max |v| (a uniform below that), else 0, so that E C(v) = v."""

    kind: ClassVar[str] = "ternary"
    summary: ClassVar[str] = "-1, 0 or 1 times the layer's largest magnitude, stochastic; unbiased"
    unbiased: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = False

    def compress(self, v: FloatArray, layer: int, draws: Draws) -> Levels:
        """Return the ternary levels of `v`; a layer of zeros gives zeros."""
        largest = checked_scale(max_magnitude(v), 1, v.dtype, layer)
        # With one step above zero QSGD's rule is TernGrad's: level 0, or 1 if the uniform is below |v|/max.
        codes = stochastic_codes(v, largest, 1, own_uniforms(draws, layer, v))
        return Levels(largest, divisor=1, base=-1, step=1, bits=2, codes=codes)

    def bits_per_value(self, size: int) -> float:
        return 2.0

    def error_bound(self, size: int) -> ErrorBound:
        # E‖C(v) − v‖² = Σ |v| (max − |v|); over max = 1 and all others a this is largest, relative to ‖v‖², at
        # a = 1/(√d + 1), where it is (√d − 1)/2.
        variance = (math.sqrt(size) - 1.0) / 2.0
        return ErrorBound(variance=variance, contraction=1.0 - variance if variance < 1.0 else None)
