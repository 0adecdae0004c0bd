"""The largest magnitude of a vector: whether it is finite, and how far it reaches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from peer.native import lib, pointer


def max_magnitude(v: npt.NDArray[np.floating[Any]]) -> float:
    """Return max |v_i|, 0 for an empty `v`; infinity or NaN if any value is."""
    if lib is not None and v.flags.c_contiguous and v.dtype == np.float32:
        return float(lib.max_magnitude_f32(pointer(v, "float[]"), v.size))
    if lib is not None and v.flags.c_contiguous and v.dtype == np.float64:
        return float(lib.max_magnitude_f64(pointer(v, "double[]"), v.size))
    if v.size == 0:
        return 0.0
    return float(max(abs(v.max()), abs(v.min())))
