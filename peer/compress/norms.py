"""Norms and means that enter payloads, as sums in an order of their own.

A scale is sent, hashed into digests and compared between runs, so its bits may depend neither on the processor nor on
whether the native kernels were built. numpy's own sums do (their order follows the width of the registers).
Here: coordinate i goes to lane i mod 1024; every lane sums in float64 in ascending order, starting from zero; then
lane j takes in lane j + 512 for j < 512, then j + 256, and so on down to one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from peer.compress.magnitude import max_magnitude
from peer.compress.payload import FloatArray
from peer.errors import LOWER_RATE, DivergenceError
from peer.native import lib, pointer

_LANES = 1024


class NotFiniteError(DivergenceError, ValueError):
    """Values cannot be sent because they grew beyond all bounds."""


def require_finite(v: FloatArray, layer: int) -> None:
    """Raise NotFiniteError, naming the layer, if `v` holds an infinity or a NaN."""
    if not np.isfinite(max_magnitude(v)):
        raise not_finite(layer)


def not_finite(layer: int) -> NotFiniteError:
    """Return the error for a layer that cannot be compressed."""
    return NotFiniteError(f"layer {layer} holds values that are not finite, or too large to compress; {LOWER_RATE}")


def sum_of_squares(v: FloatArray) -> float:
    """Return Σ v_i² in float64 (see the module docstring for its order)."""
    if lib is not None and v.flags.c_contiguous and v.dtype == np.float32:
        return float(lib.sum_of_squares_f32(pointer(v, "float[]"), v.size))
    if lib is not None and v.flags.c_contiguous and v.dtype == np.float64:
        return float(lib.sum_of_squares_f64(pointer(v, "double[]"), v.size))
    return _sum_numpy(v, lambda part, out: np.multiply(part, part, out=out, dtype=np.float64))


def sums_of_squares(v: FloatArray, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64] | None:
    """Return `sum_of_squares` of layers that follow one another, float64[layers]; None if the kernels were not built or
    do not take `v`."""
    if lib is None or not v.flags.c_contiguous or v.dtype != np.float32:
        return None
    sums = np.empty(sizes.size)
    lib.sums_of_squares_of_each(
        pointer(v, "float[]"), pointer(sizes, "int64_t[]"), sizes.size, pointer(sums, "double[]")
    )
    return sums


def sum_of_magnitudes(v: FloatArray) -> float:
    """Return Σ |v_i| in float64 (see the module docstring for its order)."""
    if lib is not None and v.flags.c_contiguous and v.dtype == np.float32:
        return float(lib.sum_of_magnitudes_f32(pointer(v, "float[]"), v.size))
    if lib is not None and v.flags.c_contiguous and v.dtype == np.float64:
        return float(lib.sum_of_magnitudes_f64(pointer(v, "double[]"), v.size))
    return _sum_numpy(v, lambda part, out: np.abs(part, out=out, dtype=np.float64))


Term = Callable[[FloatArray, npt.NDArray[np.float64]], npt.NDArray[np.float64]]


def _sum_numpy(v: FloatArray, term: Term) -> float:
    lanes, buffer = np.zeros(_LANES), np.empty(_LANES)
    # Row by row: the sum of one row into the lanes is elementwise, so numpy has no order of its own to choose.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, v.size, _LANES):
            part = v[start : start + _LANES]
            lanes[: part.size] += term(part, buffer[: part.size])
        while lanes.size > 1:
            half = lanes.size // 2
            lanes = lanes[:half] + lanes[half:]
    return float(lanes[0])
