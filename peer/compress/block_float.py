"""Block floating point: the numbers of a span share one power of two, and each is a signed integer of a few bits.

value = code · 2^exponent, the exponent being the smallest with which the largest magnitude of the span fits. Rounding
is to nearest, so no number is off by more than half of 2^exponent. Sums in float64 are exact unless the exponents of
several peers are far apart. There are no draws: the encoding peer keeps the rounding error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from peer.compress.levels import code_type
from peer.compress.magnitude import max_magnitude
from peer.compress.norms import not_finite
from peer.compress.payload import FloatArray, Levels, Payload

BlockFloat: TypeAlias = tuple[Levels, Levels]
"""The exponents of the spans, in 8 bits each, and the codes of all numbers."""
Sizes: TypeAlias = npt.NDArray[np.int64]
Exponents: TypeAlias = npt.NDArray[np.int64]

_EXPONENT_BITS = 8
LOWEST = -(1 << (_EXPONENT_BITS - 1))
"""A span whose exponent would be lower is rounded to multiples of 2^LOWEST."""


def encode(
    values: FloatArray, sizes: Sizes, bits: int, layer: int = 0, *, least: Exponents | None = None
) -> BlockFloat:
    """Return `values: float[n]`, spans of `sizes: int64[spans]` with no empty one, in codes of `bits` bits, 2 to 16.

    `least`: int64[spans], exponents below which none is chosen. Raises NotFiniteError, naming the layer, for values
    that are not finite or beyond the exponents.
    """
    powers = exponents(values, sizes, bits, layer)
    if least is not None:
        powers = np.maximum(powers, least)
    codes = np.rint(values * np.repeat(np.ldexp(1.0, -powers), sizes))
    return _levels(powers, _EXPONENT_BITS), _levels(codes, bits)


def exponents(values: FloatArray, sizes: Sizes, bits: int, layer: int = 0) -> Exponents:
    """Return the smallest exponents with which the spans fit, int64[spans]. Raises as `encode` does."""
    largest = np.maximum.reduceat(np.abs(values), _starts(sizes)).astype(np.float64)
    if not np.isfinite(max_magnitude(values)):
        raise not_finite(layer)
    mantissas, powers = np.frexp(largest)
    # The largest code is 2^(bits−1) − 1: mantissas just below 1 need one power more.
    powers = powers - (bits - 1) + (mantissas > 1.0 - 2.0 ** (1 - bits))
    powers = np.where(largest == 0.0, LOWEST, np.maximum(powers, LOWEST))
    if int(powers.max()) > -LOWEST - 1:
        raise not_finite(layer)
    return powers


def decode(block: BlockFloat, sizes: Sizes) -> npt.NDArray[np.float64]:
    """Return the values, float64[n], each of them exactly; a float32 holds them too unless they are denormal there."""
    powers, codes = map(integers, block)
    steps: npt.NDArray[np.float64] = np.repeat(np.ldexp(1.0, powers), sizes)
    return codes * steps


def split(block: BlockFloat, sizes: Sequence[Sizes]) -> list[BlockFloat]:
    """Return the codes of groups of spans that follow one another, as `encode` returns them for each group alone.
    `sizes`: int64[spans of the group], for each group."""
    exponents, codes = block
    first_span = first_number = 0
    parts = []
    for group in sizes:
        spans = slice(first_span, first_span + group.size)
        numbers = slice(first_number, first_number + int(group.sum()))
        parts.append((replace(exponents, codes=exponents.codes[spans]), replace(codes, codes=codes.codes[numbers])))
        first_span, first_number = spans.stop, numbers.stop
    return parts


def read(layers: Payload, bits: int) -> BlockFloat | None:
    """Return the layers of a message if `encode` can have returned them, for spans of some sizes; else None."""
    if len(layers) != 2:
        return None
    exponents, codes = layers
    if not (isinstance(exponents, Levels) and isinstance(codes, Levels)):
        return None
    # The lowest code of so many bits has no counterpart, and is not used.
    is_one = _has_form(exponents, _EXPONENT_BITS) and _has_form(codes, bits) and int(codes.codes.min(initial=1)) > 0
    return (exponents, codes) if is_one else None


def bound(block: BlockFloat) -> float:
    """Return a bound of |v| over all values: the largest code with the largest exponent."""
    powers, codes = map(integers, block)
    return float(np.ldexp(float(np.abs(codes).max(initial=0)), int(powers.max(initial=LOWEST))))


def _levels(integers: npt.NDArray[Any], bits: int) -> Levels:
    """Return signed integers as codes above the lowest of so many bits."""
    base = -(1 << (bits - 1))
    return Levels(1.0, divisor=1, base=base, step=1, bits=bits, codes=(integers - base).astype(code_type(bits)))


def _has_form(levels: Levels, bits: int) -> bool:
    parameters = (levels.scale, levels.divisor, levels.base, levels.step, levels.bits)
    return parameters == (1.0, 1, -(1 << (bits - 1)), 1, bits)


def integers(levels: Levels) -> npt.NDArray[np.int64]:
    """Return the signed integers of exponents or codes."""
    return levels.codes.astype(np.int64) + levels.base


def _starts(sizes: Sizes) -> Sizes:
    starts = np.zeros_like(sizes)
    np.cumsum(sizes[:-1], out=starts[1:])
    return starts
