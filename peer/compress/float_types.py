"""Real numbers in fewer bits: rounding to the float types of messages, and vectors that are kept in bfloat16.

Such a vector (`payload.Kept`) holds the upper halves of float32 numbers as uint16. It is read and written a block at a
time: `floats_of`, `store_`, `change_`, and what `decompress` adds to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

import numpy as np

from peer.compress.payload import Dense, FloatArray, Kept, ValueType
from peer.native import lib, pointer
from peer.random import Stream

_LARGEST = {ValueType.BFLOAT16: float.fromhex("0x1.fep127"), ValueType.FLOAT16: 65504.0}

BITS = {ValueType.FLOAT64: 64, ValueType.FLOAT32: 32, ValueType.BFLOAT16: 16, ValueType.FLOAT16: 16}
"""Bits of each type on the wire."""

RELATIVE_ERROR = {
    ValueType.FLOAT64: 0.0,
    ValueType.FLOAT32: 2.0**-24,
    ValueType.BFLOAT16: 2.0**-8,
    ValueType.FLOAT16: 2.0**-11,
}
"""Half a unit in the last place, of numbers in the normal range of the type."""

KEPT_AT_ONCE = 1 << 17
"""Numbers of a vector in bfloat16 that are handled at once as float32: an even number, which a cache holds."""


def own_type(v: FloatArray) -> ValueType:
    """Return the float type that carries `v` without loss."""
    return ValueType.FLOAT64 if v.dtype == np.float64 else ValueType.FLOAT32


def type_named(name: str) -> ValueType:
    """Return the value type called float64, float32, bfloat16 or float16."""
    try:
        return ValueType[name.upper()]
    except KeyError:
        raise ValueError(f"value_type is float64, float32, bfloat16 or float16, not {name!r}") from None


def rounded(v: FloatArray, value_type: ValueType) -> Dense:
    """Return `v` rounded to nearest even in `value_type`; the payload does not share memory with `v`.

    A value beyond the largest number of a 16-bit type becomes that number: infinity would end the receiver's run, and
    error feedback, if any, sends the rest later.
    """
    if value_type is ValueType.FLOAT64:
        return Dense(v.astype(np.float64), value_type)
    if value_type is ValueType.FLOAT32:
        if v.dtype == np.float32:
            return Dense(v.copy(), value_type)
        with np.errstate(over="ignore"):
            values = v.astype(np.float32)
        np.clip(values, -np.finfo(np.float32).max, np.finfo(np.float32).max, out=values)
        return Dense(values, value_type)
    if value_type is ValueType.BFLOAT16 and lib is not None and v.dtype == np.float32:
        source, result = np.ascontiguousarray(v), np.empty(v.size, np.float32)
        lib.round_to_bfloat16(pointer(source, "float[]"), v.size, pointer(result, "float[]"))
        return Dense(result, value_type)
    limit = v.dtype.type(_LARGEST[value_type])
    values = np.clip(v, -limit, limit)
    if value_type is ValueType.FLOAT16:
        return Dense(values.astype(np.float16).astype(np.float32), value_type)
    return Dense(_to_bfloat16(values), value_type)


def are_floats(kept: Kept) -> TypeGuard[FloatArray]:
    """Return whether the numbers of a vector are kept as floats, and not in bfloat16."""
    return kept.dtype != np.uint16


def floats_of(kept: Kept) -> FloatArray:
    """Return the numbers of a vector to compute with: the vector itself, or a new float32[n] of one in bfloat16."""
    if are_floats(kept):
        return kept
    bits = kept.astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)


def store_(out: Kept, values: FloatArray, stream: Stream | None = None, start: int = 0) -> None:
    """Overwrite `out` with the numbers, float[n] of its own type, or float32[n] for one in bfloat16.

    There they are rounded to nearest even or, with a stream, stochastically, so that the mean of what is stored is v:
    away from zero if half i of the stream's words, lower halves first, is at least 2¹⁶ less the lower 16 bits of v.
    Half `start` is that of the first number; it is even. The error is below 2⁻⁷ |v|, and its variance at most 2⁻¹⁶ v².
    """
    if are_floats(out):
        out[:] = values
        return
    for first in range(0, out.size, KEPT_AT_ONCE):
        block = values[first : first + KEPT_AT_ONCE]
        if stream is None:
            bits = rounded(block, ValueType.BFLOAT16).values.view(np.uint32)
        else:
            words = stream.words((block.size + 1) // 2, (start + first) // 2).astype("<u4", copy=False)
            bits = block.view(np.uint32) + words.view("<u2")[: block.size]
        bits >>= np.uint32(16)
        out[first : first + block.size] = bits


def change_(kept: Kept, change_block_: Callable[[FloatArray, slice], object], stream: Stream) -> None:
    """Let a function change all numbers of a vector in place. It gets those of a block as floats, and which they are;
    in bfloat16 they are rounded as `store_` does, else the vector is one block."""
    if are_floats(kept):
        change_block_(kept, slice(None))
        return
    for start in range(0, kept.size, KEPT_AT_ONCE):
        part = slice(start, start + KEPT_AT_ONCE)
        block = floats_of(kept[part])
        change_block_(block, part)
        store_(kept[part], block, stream, start)


def _to_bfloat16(v: FloatArray) -> FloatArray:
    """Return the nearest numbers with 8 bits of significand, ties to even, as float32."""
    if v.dtype == np.float64:
        # Through float32 a number just above a tie would be rounded to the tie first. Rounding to odd on the way
        # keeps on which side it lay (Boldo and Melquiond, 2008).
        near = v.astype(np.float32)
        bits = near.view(np.uint32)
        inexact = near.astype(np.float64) != v
        beyond = np.abs(near.astype(np.float64)) > np.abs(v)
        bits -= (inexact & beyond).astype(np.uint32)
        bits |= inexact.astype(np.uint32)
        single = near
    else:
        single = v.copy()
    bits = single.view(np.uint32)
    bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    bits &= np.uint32(0xFFFF0000)
    result: FloatArray = single
    return result
