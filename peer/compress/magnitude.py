"""The largest magnitude of a vector, which also shows whether the vector is finite."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from peer.native import lib, pointer

Floats: TypeAlias = npt.NDArray[np.floating[Any]]


def copied(source: Floats | memoryview, dtype: npt.DTypeLike) -> tuple[Floats, float]:
    """Return a copy of the numbers of `dtype`, float32 or float64, in contiguous memory, and their `max_magnitude`, in
    one pass. The memory need not be aligned."""
    values: Floats = np.empty(source.nbytes // np.dtype(dtype).itemsize, dtype)
    if lib is None:
        values[:] = np.frombuffer(source, dtype)
        return values, max_magnitude(values)
    copy, kind = (
        (lib.copy_reaching_f32, "float[]") if values.dtype == np.float32 else (lib.copy_reaching_f64, "double[]")
    )
    return values, float(copy(pointer(source, "uint8_t[]"), values.size, pointer(values, kind)))


def max_magnitude(v: Floats) -> float:
    """Return max |v_i|, 0 for an empty `v`; infinity or NaN if any value is."""
    if lib is not None and v.flags.c_contiguous and v.dtype == np.float32:
        return float(lib.max_magnitude_f32(pointer(v, "float[]"), v.size))
    if lib is not None and v.flags.c_contiguous and v.dtype == np.float64:
        return float(lib.max_magnitude_f64(pointer(v, "double[]"), v.size))
    if v.size == 0:
        return 0.0
    return float(max(abs(v.max()), abs(v.min())))
