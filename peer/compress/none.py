"""No compression: every number is sent, in full or in a shorter float type."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from peer.compress.base import Draws, ErrorBound
from peer.compress.columns import DENSE, Columns
from peer.compress.float_types import BITS, RELATIVE_ERROR, own_type, rounded
from peer.compress.layout import Layout
from peer.compress.magnitude import copied, max_magnitude
from peer.compress.norms import not_finite
from peer.compress.payload import Dense, FloatArray, ValueType

_LARGE = 1 << 16
"""Numbers of a layer beyond which it is sent by itself (`peer.wire`), so that all at once is no faster."""


@dataclass(frozen=True, kw_only=True)
class NoCompression:
    """Sends all values, rounded to nearest even where `value_type` is shorter than the vector's own type."""

    kind: ClassVar[str] = "none"
    summary: ClassVar[str] = "all values, as float32 or rounded to bfloat16 or float16"
    needs_reference: ClassVar[bool] = False

    value_type: ValueType | None = None
    """None: the vector's own float type, so that nothing is lost."""

    @property
    def unbiased(self) -> bool:
        # Rounding to nearest is biased in the strict sense, at any width.
        return self.value_type in (None, ValueType.FLOAT64)

    def compress(self, v: FloatArray, layer: int, draws: Draws) -> Dense:
        """Return all of `v`."""
        if self.value_type in (None, own_type(v)):
            values, magnitude = copied(np.ascontiguousarray(v), v.dtype)
            if not math.isfinite(magnitude):
                raise not_finite(layer)
            return Dense.reaching(values, own_type(v), magnitude)
        if not math.isfinite(max_magnitude(v)):
            raise not_finite(layer)
        return rounded(v, self.value_type)

    def compress_all(self, v: FloatArray, layout: Layout, draws: Draws) -> Columns | None:
        """Return the results of `compress` for all layers at once, or None."""
        if v.dtype != np.float32 or max(layout.sizes) > _LARGE:
            return None
        magnitude = max_magnitude(v)
        if not math.isfinite(magnitude):
            # Layer by layer the error names the one that is to blame.
            return None
        written = rounded(v, self.value_type or ValueType.FLOAT32)
        sizes = layout.size_array
        columns = Columns(
            sizes=sizes, forms=np.full(sizes.size, DENSE, np.uint8), counts=sizes, scalars=np.zeros(sizes.size),
            reals=written.values, value_type=written.value_type,
        )  # fmt: skip
        return columns.reaching(magnitude) if written.value_type is ValueType.FLOAT32 else columns

    def bits_per_value(self, size: int) -> float:
        return float(BITS[ValueType.FLOAT32 if self.value_type is None else self.value_type])

    def error_bound(self, size: int) -> ErrorBound:
        if self.value_type is None or self.unbiased:
            return ErrorBound(contraction=1.0, variance=0.0, absolute=0.0)
        return ErrorBound(contraction=1.0 - RELATIVE_ERROR[self.value_type] ** 2)
