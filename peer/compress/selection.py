"""Exact selection of the k largest of many keys, ties won by the lowest index."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from peer.compress.payload import FloatArray
from peer.native import lib, pointer


def count_of(fraction: float, size: int) -> int:
    """Return k = max(1, round(fraction · size)); `round` halves to even."""
    return min(size, max(1, round(fraction * size)))


def largest_magnitudes(v: FloatArray, k: int) -> npt.NDArray[np.int64]:
    """Return the indices of the k largest |v_i|, int64[k] ascending; NaN counts above infinity.

    Magnitudes compare as the bits of the float without its sign, which is the order of their values.
    """
    if v.dtype == np.float32:
        return _largest(np.ascontiguousarray(v).view(np.uint32), k, mask=0x7FFFFFFF, flip=0)
    keys = np.ascontiguousarray(v).view(np.uint64) & np.uint64(2**63 - 1)
    return _largest_numpy(keys, k)


def largest_of_each(
    v: FloatArray, sizes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64] | None:
    """Return `largest_magnitudes` of layers that follow one another in `v`, one after another, in one call.

    `sizes` and `counts`, int64[layers], are their n and k. None if the kernels were not built or do not take `v`.
    """
    if lib is None or v.dtype != np.float32 or not v.flags.c_contiguous or int(sizes.max()) >= 2**32:
        return None
    indices = np.empty(int(counts.sum()), np.int64)
    pointers = [pointer(array, "int64_t[]") for array in (sizes, counts, indices)]
    raw = pointer(v, "uint32_t[]")
    if lib.select_largest_of_each(raw, pointers[0], pointers[1], sizes.size, 0x7FFFFFFF, 0, pointers[2]) != 0:
        raise MemoryError(f"no memory to select {indices.size} of {v.size} numbers")
    return indices


def smallest_words(words: npt.NDArray[np.uint32], k: int) -> npt.NDArray[np.int64]:
    """Return the indices of the k smallest words, int64[k] ascending."""
    return _largest(np.ascontiguousarray(words), k, mask=0xFFFFFFFF, flip=0xFFFFFFFF)


def _largest(raw: npt.NDArray[np.uint32], k: int, *, mask: int, flip: int) -> npt.NDArray[np.int64]:
    """Select by the keys `(raw & mask) ^ flip`."""
    if k == raw.size:
        return np.arange(k, dtype=np.int64)
    if lib is not None and raw.size < 2**32:
        indices = np.empty(k, np.int64)
        source, target = pointer(raw, "uint32_t[]"), pointer(indices, "int64_t[]")
        if lib.select_largest(source, raw.size, k, mask, flip, target) != 0:
            raise MemoryError(f"no memory to select {k} of {raw.size} numbers")
        return indices
    return _largest_numpy((raw & np.uint32(mask)) ^ np.uint32(flip), k)


def _largest_numpy(keys: npt.NDArray[np.unsignedinteger], k: int) -> npt.NDArray[np.int64]:
    threshold = np.partition(keys, keys.size - k)[keys.size - k]
    chosen = keys > threshold
    ties = np.flatnonzero(keys == threshold)
    chosen[ties[: k - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen).astype(np.int64, copy=False)
