"""Random quantization by the layer's norm (Alistarh et al., "QSGD", NeurIPS 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from peer.compress.base import Draws
from peer.compress.bound import ErrorBound
from peer.compress.levels import checked_scale, stochastic_codes
from peer.compress.norms import sum_of_squares
from peer.compress.payload import FloatArray, Levels
from peer.compress.settings import require_flag, require_whole
from peer.compress.sources import own_uniforms


@dataclass(frozen=True, kw_only=True)
class Qsgd:
    """Sends `sign(v) ‖v‖ level/s` with s = 2^bits − 1 and stochastic levels of |v|/‖v‖, so that E C(v) = v.

    `bits` counts the level; the sign is one more bit, and bits + 1 is what is reported. Biased, the values are scaled
    by 1/(1 + ω), ω = min(d/s², √d/s) with d the size of the layer, which makes the compressor a contraction.
    """

    kind: ClassVar[str] = "qsgd"
    summary: ClassVar[str] = "stochastic levels of |v|/‖v‖, 1 to 8 bits and the sign; unbiased, or scaled down"
    needs_reference: ClassVar[bool] = False

    bits: int
    unbiased: bool = True

    def __post_init__(self) -> None:
        require_whole("bits", self.bits, 1, 8)
        require_flag("unbiased", self.unbiased)

    def compress(self, v: FloatArray, layer: int, draws: Draws) -> Levels:
        """Return the levels of `v`; a layer of norm 0 gives zeros."""
        # The norm is the fixed-order float64 sum of `norms`, rounded once to the vector's type.
        norm = checked_scale(math.sqrt(sum_of_squares(v)), self.steps, v.dtype, layer)
        codes = stochastic_codes(v, norm, self.steps, own_uniforms(draws, layer, v))
        scale = norm if self.unbiased else float(v.dtype.type(norm / (1.0 + self._variance(v.size))))
        return Levels(scale, divisor=self.steps, base=-self.steps, step=1, bits=self.bits + 1, codes=codes)

    @property
    def steps(self) -> int:
        """s, the number of levels above zero."""
        return (1 << self.bits) - 1

    def bits_per_value(self, size: int, float_bits: int = 32) -> float:
        return float(self.bits + 1)

    def error_bound(self, size: int) -> ErrorBound:
        variance = self._variance(size)
        if self.unbiased:
            return ErrorBound(variance=variance, contraction=1.0 - variance if variance < 1.0 else None)
        return ErrorBound(contraction=1.0 / (1.0 + variance))

    def _variance(self, size: int) -> float:
        """ω of lemma 3.1."""
        return min(size / self.steps**2, math.sqrt(size) / self.steps)
