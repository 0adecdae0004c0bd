"""Real numbers in fewer bits: rounding to the float types of messages."""

from __future__ import annotations

import numpy as np

from peer.compress.payload import Dense, FloatArray, ValueType
from peer.native import lib, pointer

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
