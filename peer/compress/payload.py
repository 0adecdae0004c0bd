"""Payloads: a compressor's output for one layer, as plain values, not bytes.

These types are the seam between `compress/` (which loses information on purpose) and `wire/` (which never does): for
every payload `wire.decode(wire.encode(p))` equals `p`. Integers are held in the smallest numpy type that fits, reals
in the float type of the vector they came from (float32 in production, float64 in replay).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from peer.compress.magnitude import max_magnitude

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
Kept: TypeAlias = FloatArray | npt.NDArray[np.uint16]
"""Numbers that a peer keeps: as floats, or as the 16 bits of bfloat16 (`float_types`)."""


class ValueType(enum.IntEnum):
    """Type of a real number in a frame. A `Dense` payload holds only values that its type represents exactly."""

    FLOAT64 = 0
    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3


class Rounding(enum.IntEnum):
    """The three roundings of Moniqua's code."""

    NEAREST = 0
    STOCHASTIC = 1
    DITHER = 2


@dataclass(frozen=True, eq=False)
class Dense:
    """All values of the layer. `values: float[n]`, float64 where `value_type` is FLOAT64 and float32 otherwise."""

    values: FloatArray
    value_type: ValueType

    @cached_property
    def magnitude(self) -> float:
        """max |v|, infinity or NaN if any value is: compressor, writer and judge ask for it, and it costs a pass."""
        return max_magnitude(self.values)

    @classmethod
    def reaching(cls, values: FloatArray, value_type: ValueType, magnitude: float) -> Dense:
        """Return values whose largest magnitude is known."""
        payload = cls(values, value_type)
        payload.__dict__["magnitude"] = magnitude
        return payload


@dataclass(frozen=True, eq=False)
class Levels:
    """Equally spaced levels: value = scale · (base + step · code) / divisor.

    qsgd: scale ‖v‖, divisor s, base −s, step 1, bits b + 1. sign: scale mean|v|, base −1, step 2, bits 1, divisor 1.
    ternary: scale max|v|, base −1, step 1, bits 2, divisor 1. grid: scale Δ, base the lowest multiple, step 1.
    """

    scale: float
    """A number of the vector's own float type."""
    divisor: int
    base: int
    step: int
    bits: int
    """1 to 16; every code is below 2**bits."""
    codes: npt.NDArray[np.unsignedinteger[Any]]
    """uint8[n] for up to 8 bits, uint16[n] above."""


@dataclass(frozen=True, eq=False)
class Sparse:
    """k of `size` coordinates; the others are zero. `indices: int64[k]`, strictly ascending."""

    size: int
    indices: npt.NDArray[np.int64]
    values: Dense | Levels


@dataclass(frozen=True, eq=False)
class Residues:
    """Moniqua's modulo code of a layer: `K mod 2**bits`, to be recovered against the receiver's own vector."""

    theta: float
    """The sender's θ, a number of the vector's own float type; B = 2θ/(1 − 2δ)."""
    bits: int
    rounding: Rounding
    residues: npt.NDArray[np.unsignedinteger[Any]]
    """uint8[n] for up to 8 bits, uint16[n] above."""
    check: int | None
    """In verified mode: 64-bit hash over the un-modded K (`compress.modulo.hash_integers`)."""


@dataclass(frozen=True, eq=False)
class MoreBits:
    """A repair: bits `low` to `low + bits − 1` of the same integers K whose lowest bits a `Residues` carried."""

    low: int
    bits: int
    """1 to 16."""
    codes: npt.NDArray[np.unsignedinteger[Any]]
    """(K >> low) mod 2**bits; uint8[n] for up to 8 bits, uint16[n] above."""


@dataclass(frozen=True, eq=False)
class WholeIntegers:
    """The last repair: all of K. `integers: int64[n]`."""

    integers: npt.NDArray[np.int64]


LayerPayload: TypeAlias = Dense | Levels | Sparse | Residues | MoreBits | WholeIntegers
Payload: TypeAlias = Sequence[LayerPayload]
"""One entry for each layer, in the order of the layout: a tuple, or `columns.Columns`."""


def num_values(payload: LayerPayload) -> int:
    """Return the size of the layer that the payload describes."""
    if isinstance(payload, Dense):
        return payload.values.size
    if isinstance(payload, Sparse):
        return payload.size
    if isinstance(payload, Residues):
        return payload.residues.size
    if isinstance(payload, WholeIntegers):
        return payload.integers.size
    return payload.codes.size
