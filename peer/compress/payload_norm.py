"""The Euclidean norm of what a payload says, from its codes: nothing is decompressed."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from peer.compress.columns import LEVELS, SPARSE, CodeArray, Columns
from peer.compress.norms import sum_of_squares
from peer.compress.payload import Dense, LayerPayload, Levels, Payload, Sparse

_AT_ONCE = 1 << 15
"""Codes handled at once: they and their temporaries stay in the cache."""


def norm(layers: Payload) -> float:
    """Return ‖v‖₂ of all values of a payload; infinity or NaN where any value is. Modulo codes say nothing of how large
    values are, and count nothing."""
    return math.sqrt(_squares_of_columns(layers) if isinstance(layers, Columns) else sum(map(_squares, layers)))


def norm_at_most(layers: Payload) -> float:
    """Return a bound of `norm` that costs next to nothing where all layers are coded alike; else `norm` itself."""
    if not isinstance(layers, Columns):
        return norm(layers)
    return layers.largest * math.sqrt(layers.codes.size + layers.reals.size)


def _squares(layer: LayerPayload) -> float:
    layer = layer.values if isinstance(layer, Sparse) else layer
    if isinstance(layer, Dense):
        return sum_of_squares(layer.values)
    if isinstance(layer, Levels):
        return (layer.scale / layer.divisor) ** 2 * _squares_of_codes(layer.codes, layer.base, layer.step)
    return 0.0


def _squares_of_columns(columns: Columns) -> float:
    total = sum_of_squares(columns.reals) if columns.reals.size else 0.0
    if columns.levels is None:
        return total
    divisor, base, step, _ = columns.levels
    coded = (columns.forms & ~np.uint8(SPARSE)) == LEVELS
    counts, scales = columns.counts[coded], columns.scalars[coded] / divisor
    if counts.sum() <= _AT_ONCE:
        # Many small layers: one call for all of them.
        weights = np.repeat(scales, counts)
        values = (np.multiply(columns.codes, step, dtype=np.float64) + base) * weights
        return total + float(values @ values)
    ends = np.cumsum(counts)
    for start, stop, scale in zip((ends - counts).tolist(), ends.tolist(), scales.tolist(), strict=True):
        total += scale * scale * _squares_of_codes(columns.codes[start:stop], base, step)
    return total


def _squares_of_codes(codes: CodeArray, base: int, step: int) -> float:
    """Return Σ (base + step · code)²."""
    total, number = 0.0, np.float32
    for start in range(0, codes.size, _AT_ONCE):
        values: npt.NDArray[np.float32] = codes[start : start + _AT_ONCE].astype(number)
        values *= number(step)
        values += number(base)
        total += float(values @ values)
    return total
