"""The k largest magnitudes of each layer (Stich et al., "Sparsified SGD with memory", NeurIPS 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from peer.compress.base import Draws, ErrorBound
from peer.compress.columns import DENSE, LEVELS, SPARSE, Columns
from peer.compress.float_types import rounded
from peer.compress.kept_values import KeptValues
from peer.compress.layout import Layout
from peer.compress.levels import four_levels_of_each, nearest_levels_of_each
from peer.compress.norms import not_finite
from peer.compress.payload import FloatArray, Sparse, ValueType
from peer.compress.selection import count_of, largest_magnitudes, largest_of_each


@dataclass(frozen=True, kw_only=True)
class TopK(KeptValues):
    """Sends the k largest magnitudes exactly, or rounded; of equal magnitudes the lowest index wins.

    Values rounded to `value_bits` use `levels.nearest_levels`, or with `four_levels` that; their docstrings say why.
    """

    kind: ClassVar[str] = "top_k"
    summary: ClassVar[str] = "the largest magnitudes, exact or in 1 to 16 bits; biased"
    unbiased: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False

    def compress(self, v: FloatArray, layer: int, draws: Draws) -> Sparse:
        """Return the k largest of `v`."""
        indices = largest_magnitudes(v, count_of(self.fraction, v.size))
        kept: FloatArray = np.take(v, indices)
        # Non-finite values rank above all finite ones, so they are among the kept.
        if not np.isfinite(kept).all():
            raise not_finite(layer)
        return Sparse(v.size, indices, self.written(kept, layer))

    def compress_all(self, v: FloatArray, layout: Layout, draws: Draws) -> Columns | None:
        """Return the results of `compress` for all layers, at once if that is faster, or None."""
        sizes = layout.size_array
        # As `count_of` has it.
        counts = np.minimum(np.maximum(np.rint(self.fraction * sizes), 1), sizes).astype(np.int64)
        indices = largest_of_each(v, sizes, counts)
        if indices is None:
            return None
        kept: FloatArray = np.take(v, indices + np.repeat(np.cumsum(sizes) - sizes, counts))
        if not np.isfinite(kept).all():
            # Layer by layer the error names the one that is to blame.
            return None
        if self.value_bits is None:
            written = rounded(kept, self.value_type or ValueType.FLOAT32)
            return Columns(
                sizes=sizes, forms=np.full(sizes.size, SPARSE | DENSE, np.uint8), counts=counts,
                scalars=np.zeros(sizes.size), indices=indices, reals=written.values, value_type=written.value_type,
            )  # fmt: skip
        four = self.has_four_levels
        found = four_levels_of_each(kept, counts) if four else nearest_levels_of_each(kept, counts, self.value_bits)
        if found is None:
            return None
        levels, scales, codes = found
        return Columns(
            sizes=sizes, forms=np.full(sizes.size, SPARSE | LEVELS, np.uint8), counts=counts, scalars=scales,
            indices=indices, codes=codes, levels=levels,
        )  # fmt: skip

    def bits_per_value(self, size: int) -> float:
        return self.bits_with_indices(size, count_of(self.fraction, size))

    def error_bound(self, size: int) -> ErrorBound:
        k = count_of(self.fraction, size)
        if self.value_bits is None:
            return ErrorBound(contraction=k / size * self.kept_energy(k))
        if self.value_bits == 1 or self.has_four_levels:
            # The energy left is ‖v_K‖₁²/k, or more. Worst: all equal, or all but one zero.
            return ErrorBound(contraction=min(1.0 / k, k / size))
        # As `kept_energy`, with the coordinates that are left out as large as the rule allows.
        c = self.half_step**2
        return ErrorBound(contraction=min(1.0 / (1.0 + (size - 1) * c), (1.0 + (k - 1) * (1.0 - c)) / size))
