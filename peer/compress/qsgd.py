"""Random quantization by the layer's norm (Alistarh et al., "QSGD", NeurIPS 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from peer.compress.base import Draws, ErrorBound, own_uniforms
from peer.compress.columns import LEVELS, Columns
from peer.compress.layout import Layout
from peer.compress.levels import checked_scale, stochastic_codes, stochastic_codes_of_each
from peer.compress.norms import sum_of_squares, sums_of_squares
from peer.compress.payload import FloatArray, Levels
from peer.compress.settings import require_flag, require_whole
from peer.random import PeerDraws


@dataclass(frozen=True, kw_only=True)
class Qsgd:
    """Sends `sign(v) ‖v‖ level/s` with s = 2^bits − 1 and stochastic levels of |v|/‖v‖, so that E C(v) = v.

    `bits` counts the level; the sign is one more bit, and bits + 1 are reported. Biased, the values are scaled by 1/(1
    + ω), ω = min(d/s², √d/s) with d the size of the layer, which makes the compressor a contraction.
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

    def compress_all(self, v: FloatArray, layout: Layout, draws: Draws) -> Columns | None:
        """Return the results of `compress` for all layers, at once if that is faster, or None."""
        sizes = layout.size_array
        sums = sums_of_squares(v, sizes) if isinstance(draws, PeerDraws) else None
        if sums is None or not isinstance(draws, PeerDraws):
            return None
        with np.errstate(over="ignore"):
            norms = np.sqrt(sums).astype(np.float32).astype(np.float64)
        if not np.all(norms * self.steps <= float(np.finfo(np.float32).max) / 2):
            # Layer by layer the error names the one that is to blame.
            return None
        codes = stochastic_codes_of_each(v, sizes, norms, self.steps, draws.own_stream(0))
        scales = norms
        if not self.unbiased:
            variances = np.array([self._variance(size) for size in layout.sizes])
            scales = (norms / (1.0 + variances)).astype(np.float32).astype(np.float64)
        return Columns(
            sizes=sizes, forms=np.full(sizes.size, LEVELS, np.uint8), counts=sizes, scalars=scales, codes=codes,
            levels=(self.steps, -self.steps, 1, self.bits + 1),
        )  # fmt: skip

    @property
    def steps(self) -> int:
        """s, the number of levels above zero."""
        return (1 << self.bits) - 1

    def bits_per_value(self, size: int) -> float:
        return float(self.bits + 1)

    def error_bound(self, size: int) -> ErrorBound:
        variance = self._variance(size)
        if self.unbiased:
            return ErrorBound(variance=variance, contraction=1.0 - variance if variance < 1.0 else None)
        return ErrorBound(contraction=1.0 / (1.0 + variance))

    def _variance(self, size: int) -> float:
        """ω of lemma 3.1."""
        return min(size / self.steps**2, math.sqrt(size) / self.steps)
