"""Form of the values that a sparse compressor keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from peer.compress.float_types import BITS, RELATIVE_ERROR, own_type, rounded
from peer.compress.levels import checked_scale, four_levels, nearest_levels, stochastic_codes
from peer.compress.magnitude import max_magnitude
from peer.compress.payload import Dense, FloatArray, Levels, ValueType
from peer.compress.settings import require_flag, require_positive, require_whole
from peer.random import Stream


@dataclass(frozen=True, kw_only=True)
class KeptValues:
    """The common settings of `top_k` and `random_k`."""

    fraction: float
    """Part of the layer that is kept: k = max(1, round(fraction · size))."""
    value_bits: int | None = None
    """None: float values. 1 to 16: levels of that many bits, the sign included."""
    value_type: ValueType | None = None
    """The float type of the values; None: the vector's own. Not together with `value_bits`."""
    four_levels: bool = False
    """Two bits are a sign and one of two sizes, not −s, 0 or s, where they are rounded to nearest."""

    def __post_init__(self) -> None:
        require_positive("fraction", self.fraction, 1.0)
        if self.value_bits is not None:
            require_whole("value_bits", self.value_bits, 1, 16)
        require_flag("four_levels", self.four_levels)
        if self.value_bits is not None and self.value_type is not None:
            raise ValueError("value_bits and value_type exclude each other; leave one of them out")

    def written(self, kept: FloatArray, layer: int) -> Dense | Levels:
        """Return the values rounded to nearest."""
        if self.has_four_levels:
            return four_levels(kept, layer)
        if self.value_bits is not None:
            return nearest_levels(kept, self.value_bits, layer)
        return rounded(kept, own_type(kept) if self.value_type is None else self.value_type)

    @property
    def has_four_levels(self) -> bool:
        """Whether `written` returns two bits without zero."""
        return self.four_levels and self.value_bits == 2

    def written_unbiased(self, kept: FloatArray, uniforms: FloatArray | Stream, layer: int) -> Levels:
        """Return the values on 2·L + 1 levels up to the largest magnitude, rounded stochastically."""
        assert self.value_bits is not None
        steps = (1 << (self.value_bits - 1)) - 1
        scale = checked_scale(max_magnitude(kept), steps, kept.dtype, layer)
        codes = stochastic_codes(kept, scale, steps, uniforms)
        return Levels(scale, divisor=steps, base=-steps, step=1, bits=self.value_bits, codes=codes)

    def bits_with_indices(self, size: int, k: int) -> float:
        """Return the nominal bits of one coordinate of the layer: values and log2 C(size, k) for the indices."""
        choices = (math.lgamma(size + 1) - math.lgamma(k + 1) - math.lgamma(size - k + 1)) / math.log(2.0)
        written = ValueType.FLOAT32 if self.value_type is None else self.value_type
        bits = BITS[written] if self.value_bits is None else self.value_bits
        return (k * bits + choices) / size

    def kept_energy(self, k: int) -> float:
        """Return the least share of Σ v² of the k kept values that survives rounding to nearest."""
        if self.value_bits is None:
            return 1.0 if self.value_type is None else 1.0 - RELATIVE_ERROR[self.value_type] ** 2
        if self.value_bits == 1 or self.has_four_levels:
            # The energy left is ‖v‖₁²/k, or more.
            return 1.0 / k
        # A squared error is at most min(v², c max²), c = (half a step)²: worst where all but the largest are just
        # below half a step, or equal to it.
        c = self.half_step**2
        return min(1.0 / (1.0 + (k - 1) * c), (1.0 + (k - 1) * (1.0 - c)) / k)

    @property
    def half_step(self) -> float:
        """Half the distance of two levels, over the largest of them; for two value bits and more."""
        assert self.value_bits is not None
        return 0.5 / ((1 << (self.value_bits - 1)) - 1)
