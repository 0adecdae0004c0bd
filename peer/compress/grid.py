"""Multiples of a fixed step, with stochastic or nearest rounding (Gupta et al. 2015; the empirical study's Q)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from peer.compress.base import Draws, ErrorBound, own_uniforms
from peer.compress.float_types import own_type
from peer.compress.levels import code_type, grid_multiples
from peer.compress.norms import require_finite
from peer.compress.payload import Dense, FloatArray, Levels
from peer.compress.settings import BY_ALGORITHM, require_positive, require_whole


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Sends multiples of Δ. Stochastic: up if the uniform is **at most** the fraction of v/Δ. Nearest: ⌊v/Δ + ½⌋.

    Give `step` for an endless grid. Give `bits` and `range` for the 2^bits multiples of Δ = range/2^(bits−1) from
    −range to range − Δ, to which values beyond are clipped: a fixed-point number of that many bits with zero among its
    values, as the study's quantized model needs.
    """

    kind: ClassVar[str] = "grid"
    summary: ClassVar[str] = "multiples of a step, stochastic or nearest; unbounded, or 2^bits of them over a range"
    needs_reference: ClassVar[bool] = False

    step: float | None = None
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    bits: int | None = field(default=None, metadata=BY_ALGORITHM)
    """1 to 16, with `range`."""
    range: float | None = field(default=None, metadata=BY_ALGORITHM)

    def __post_init__(self) -> None:
        if self.rounding not in ("stochastic", "nearest"):
            raise ValueError(f"rounding is 'stochastic' or 'nearest', not {self.rounding!r}")
        if self.step is not None:
            require_positive("step", self.step)
            if self.bits is not None or self.range is not None:
                raise ValueError("a grid has either a step, or bits and a range")
        elif self.bits is None or self.range is None:
            raise ValueError("a grid needs a step, or bits and a range")
        else:
            require_whole("bits", self.bits, 1, 16)
            require_positive("range", self.range)

    @property
    def unbiased(self) -> bool:
        """Clipping is biased, but only beyond the range."""
        return self.rounding == "stochastic" and self.bits is None

    @property
    def spacing(self) -> float:
        """Δ."""
        if self.step is not None:
            return self.step
        assert self.bits is not None
        assert self.range is not None
        return float(self.range) / (1 << (self.bits - 1))

    def compress(self, v: FloatArray, layer: int, draws: Draws) -> Levels | Dense:
        """Return the multiples as levels; if more than 2^16 of them are needed, as plain values.

        A value too large for its type to hold the fraction of v/Δ is its own nearest multiple.
        """
        require_finite(v, layer)
        step = v.dtype.type(self.spacing)
        if not 0 < step < np.inf:
            raise ValueError(f"a grid of step {self.spacing:g} does not fit into {v.dtype}")
        uniforms = own_uniforms(draws, layer, v) if self.rounding == "stochastic" else None
        multiples, lowest, highest = grid_multiples(v, float(step), uniforms)
        if self.bits is not None:
            base, bits = -(1 << (self.bits - 1)), self.bits
            np.clip(multiples, base, -base - 1, out=multiples)
        elif max(-lowest, highest) < 2**31 and highest - lowest < 2**16:
            base, bits = int(lowest), max(1, int(highest - lowest).bit_length())
        else:
            exact = np.abs(multiples) < 2.0 ** np.finfo(v.dtype).nmant
            with np.errstate(over="ignore", invalid="ignore"):
                return Dense(np.where(exact, multiples * step, v).astype(v.dtype), own_type(v))
        multiples -= v.dtype.type(base)
        return Levels(float(step), divisor=1, base=base, step=1, bits=bits, codes=multiples.astype(code_type(bits)))

    def bits_per_value(self, size: int) -> float:
        # Without a range it depends on the values; 16 is the most that is sent as levels.
        return float(16 if self.bits is None else self.bits)

    def error_bound(self, size: int) -> ErrorBound:
        if self.bits is not None:
            return ErrorBound()
        return ErrorBound(absolute=self.spacing / (1.0 if self.rounding == "stochastic" else 2.0))
