"""Common ground of writer and reader of sections: tags, repeated parameters, and limits of levels and scales.

A section begins with a tag whose lowest three bits name the payload and whose upper bits depend on it. Parameters that
repeat those of the section before (of the same kind of payload) cost one bit; `Repeats` holds them. `section_writer`
and `section_reader` are the two directions.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from peer.compress.payload import LayerPayload, Residues, Rounding, ValueType
from peer.wire.bits import UnsignedArray
from peer.wire.errors import LevelOutOfRange, ParameterOutOfRange

EXACT = 2**53
"""Integers up to here are exact in float64; levels stay within."""

FORMATS: dict[ValueType, tuple[int, int, type[np.unsignedinteger[Any]]]] = {
    ValueType.FLOAT64: (64, 11, np.uint64),
    ValueType.FLOAT32: (32, 8, np.uint32),
    ValueType.BFLOAT16: (16, 8, np.uint16),
    ValueType.FLOAT16: (16, 5, np.uint16),
}
"""Bits, exponent bits, and the type that holds a bit pattern."""

GREATEST = {False: float(np.finfo(np.float32).max), True: float(np.finfo(np.float64).max)}
"""The largest scale, without and with *wide*."""


class Tag(enum.IntEnum):
    """The kind of payload that a section holds."""

    DENSE = 0
    LEVELS = 1
    SPARSE = 2
    RESIDUES = 3
    MORE_BITS = 4
    WHOLE_INTEGERS = 5


SAME = 1 << 3
SAME_THETA = 1 << 4
PREDICTED = 1 << 5
CODEC = 6
"""The codec's place in a tag."""


@dataclass
class Repeats:
    """The parameters that a section may repeat, and the type of scalars in this frame."""

    wide: bool
    """Whether scales and θ are float64."""
    levels: tuple[int, int, int, int] | None = None
    """divisor, base, step, bits"""
    residues: tuple[int, Rounding, bool] | None = None
    """bits, rounding, whether there is a check"""
    theta: float | None = None
    more_bits: tuple[int, int] | None = None
    """low, bits"""


PoolKey = tuple[bool, int]
"""Whether a pool holds codes, and their width or the type of dense values; the pools of a frame come in ascending
order."""


def difference(codes: UnsignedArray, previous: UnsignedArray, width: int) -> UnsignedArray:
    """Return (codes − previous) mod 2**width; all arrays `uint8[n]` or `uint16[n]`."""
    change: UnsignedArray = codes - previous
    keep_low_bits(change, width)
    return change


def keep_low_bits(codes: UnsignedArray, width: int) -> None:
    """Reduce codes modulo 2**width, in place."""
    if width < 8 * codes.itemsize:
        codes &= codes.dtype.type((1 << width) - 1)


def predicts(previous: LayerPayload | None, width: int, size: int) -> bool:
    """Return whether residues of `width` bits can be coded against an earlier payload of their layer."""
    return isinstance(previous, Residues) and previous.bits == width and previous.residues.size == size


def rotated(patterns: UnsignedArray, by: int) -> UnsignedArray:
    """Return the bit patterns rotated left."""
    kind = patterns.dtype.type
    result: UnsignedArray = patterns << kind(by)
    result |= patterns >> kind(8 * patterns.itemsize - by)
    return result


def check_level_parameters(divisor: int, base: int, step: int, bits: int, error: type[Exception]) -> None:
    """Raise `error` unless the levels of all codes are exact integers."""
    if not (1 <= bits <= 16 and 1 <= divisor <= EXACT and 1 <= step <= EXACT):
        raise error(f"levels cannot have divisor {divisor}, step {step} and {bits} bits")
    if abs(base) + (step << bits) > EXACT:
        raise (LevelOutOfRange if error is ParameterOutOfRange else error)(
            f"levels from {base} in steps of {step} with {bits} bits exceed exact integers"
        )


def greatest_level(levels: tuple[int, int, int, int] | None) -> int:
    """Return the largest magnitude of a level; 1 for a scalar that multiplies none."""
    if levels is None:
        return 1
    _, base, step, bits = levels
    return max(abs(base), abs(base + (step << bits)))


def check_scaled(scale: float, levels: tuple[int, int, int, int] | None, wide: bool, error: type[Exception]) -> None:
    """Raise `error` unless scale · level is finite for every level, in the float type of the frame."""
    if not (math.isfinite(scale) and abs(scale) * greatest_level(levels) <= GREATEST[wide]):
        raise error(f"a scale or θ of {scale} is not finite, or a level times it is not")
