"""k random coordinates of each layer (Stich et al., "Sparsified SGD with memory", NeurIPS 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from peer.compress.base import Draws, ErrorBound, own_uniforms
from peer.compress.kept_values import KeptValues
from peer.compress.norms import require_finite
from peer.compress.payload import FloatArray, Sparse, ValueType
from peer.compress.selection import count_of, smallest_words
from peer.compress.settings import require_flag


@dataclass(frozen=True, kw_only=True)
class RandomK(KeptValues):
    """Sends k coordinates drawn without replacement: those with the k smallest words, ties won by the lowest index.

    Biased, their own values; unbiased, scaled by size/k. Values of `value_bits` bits are rounded to nearest where
    biased, and stochastically, with the uniforms of coordinates 0 to k − 1, where unbiased.
    """

    kind: ClassVar[str] = "random_k"
    summary: ClassVar[str] = "random coordinates, unbiased (scaled by size/k) or biased"
    needs_reference: ClassVar[bool] = False

    unbiased: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_flag("unbiased", self.unbiased)
        if self.unbiased and self.value_bits == 1:
            raise ValueError("value_bits is at least 2 for an unbiased random_k: one bit has no level between ±")
        if self.unbiased and self.value_type in (ValueType.BFLOAT16, ValueType.FLOAT16):
            raise ValueError("an unbiased random_k cannot round to nearest; use value_bits in place of value_type")

    def compress(self, v: FloatArray, layer: int, draws: Draws) -> Sparse:
        """Return k random coordinates of `v`."""
        require_finite(v, layer)
        k = count_of(self.fraction, v.size)
        indices = smallest_words(draws.words(layer, v.size), k)
        kept: FloatArray = np.take(v, indices)
        if not self.unbiased:
            return Sparse(v.size, indices, self.written(kept, layer))
        with np.errstate(over="ignore"):
            kept *= v.dtype.type(v.size / k)
        require_finite(kept, layer)
        if self.value_bits is None:
            return Sparse(v.size, indices, self.written(kept, layer))
        return Sparse(v.size, indices, self.written_unbiased(kept, own_uniforms(draws, layer, kept), layer))

    def bits_per_value(self, size: int) -> float:
        return self.bits_with_indices(size, count_of(self.fraction, size))

    def error_bound(self, size: int) -> ErrorBound:
        k = count_of(self.fraction, size)
        if self.unbiased:
            # The variance of stochastic rounding is at most (half a step)² for each value, and max² ≤ ‖v_K‖².
            extra = 0.0 if self.value_bits is None else k * self.half_step**2
            variance = size / k * (1.0 + extra) - 1.0
            return ErrorBound(variance=variance, contraction=1.0 - variance if variance < 1.0 else None)
        return ErrorBound(contraction=k / size * self.kept_energy(k))
