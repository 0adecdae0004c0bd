"""Equally spaced levels: choice of codes by the sender, computation of values by everyone."""

from __future__ import annotations

import math
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from peer.compress.magnitude import max_magnitude
from peer.compress.norms import not_finite, sum_of_magnitudes, sum_of_squares
from peer.compress.payload import FloatArray, Levels
from peer.errors import RemoteProtocolError
from peer.native import CData, ffi, lib, pointer
from peer.random import Stream

CodeArray = npt.NDArray[np.unsignedinteger[Any]]
Uniforms = FloatArray | Stream
"""Uniforms, or the stream from which they are drawn."""

_LARGEST_INTEGER = 2**53
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def code_type(bits: int) -> type[np.uint8] | type[np.uint16]:
    """Return the numpy type that holds codes of `bits` bits."""
    return np.uint8 if bits <= 8 else np.uint16


def level_values(levels: Levels, dtype: npt.DTypeLike) -> FloatArray:
    """Return the values of the codes: `scale · (base + step · code) / divisor`, float[n].

    In this order, each step rounded in `dtype`: the integer, times the scale, by the divisor. Raises
    RemoteProtocolError if a value is not finite.
    """
    codes = levels.codes
    if codes.size > 2**levels.bits:
        # As many different values as codes: compute each once. The arithmetic is the same, so are the bits.
        table = _values(levels, np.arange(2**levels.bits), np.dtype(dtype))
        values: FloatArray = np.take(table, codes)
    else:
        table = values = _values(levels, codes, np.dtype(dtype))
    if not np.isfinite(table).all() and not np.isfinite(values).all():
        raise RemoteProtocolError(f"levels of scale {levels.scale:g} exceed the range of {np.dtype(dtype)}")
    return values


def add_levels_(out: FloatArray, levels: Levels, weight: float) -> None:
    """Add `weight` times the values of the codes to `out`, in place: the bits of `out += weight * level_values(…)`."""
    codes = levels.codes
    safe = codes.dtype in (np.uint8, np.uint16) and are_safe(
        levels.divisor, levels.base, levels.step, levels.bits, levels.scale
    )
    if codes.shape != out.shape:
        raise ValueError(f"{codes.size} codes cannot be added to {out.size} numbers")
    if lib is None or out.dtype != np.float32 or not out.flags.c_contiguous or not safe:
        values = level_values(levels, out.dtype)
        out += values if weight == 1.0 else values * out.dtype.type(weight)
        return
    lib.add_levels(
        pointer(out, "float[]"), pointer(np.ascontiguousarray(codes), "uint8_t[]"), codes.itemsize,
        out.size, levels.scale, levels.base, levels.step, levels.divisor, weight,
    )  # fmt: skip


def are_safe(divisor: int, base: int, step: int, bits: int, scale: float) -> bool:
    """Return whether the kernels compute such levels: in 32-bit integers, and finite in float32."""
    ends = greatest_level(base, step, bits)
    return ends < 2**31 and divisor < 2**24 and ends * abs(scale) < _LARGEST_FLOAT32


def greatest_level(base: int, step: int, bits: int) -> int:
    """Return a bound of the magnitude of the levels."""
    return abs(base) + (abs(step) << bits)


def _values(levels: Levels, codes: npt.NDArray[np.integer[Any]], dtype: np.dtype[Any]) -> FloatArray:
    if abs(levels.base) + abs(levels.step) * 2**levels.bits > _LARGEST_INTEGER or levels.divisor < 1:
        raise RemoteProtocolError(
            f"levels from {levels.base} by {levels.step} over {levels.divisor} lie outside of exact arithmetic"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        values: FloatArray = (levels.base + levels.step * codes.astype(np.int64)).astype(dtype)
        values *= dtype.type(levels.scale)
        if levels.divisor != 1:
            values /= dtype.type(levels.divisor)
    return values


def checked_scale(scale: float, steps: int, dtype: np.dtype[Any], layer: int) -> float:
    """Return `scale` as the type holds it. Raises NotFiniteError, naming the layer, if `steps` times it could overflow.

    That includes everything that is not finite.
    """
    with np.errstate(over="ignore"):
        result = float(dtype.type(scale))
    if not result * steps <= float(np.finfo(dtype).max) / 2:
        raise not_finite(layer)
    return result


def stochastic_codes(v: FloatArray, scale: float, steps: int, uniforms: Uniforms) -> CodeArray:
    """Return codes of the levels −scale … scale in `2 · steps + 1` values: `steps + sign(v_i) · level_i`.

    level = ⌊steps |v|/scale⌋, plus one if the uniform is **below** the fractional part, never above `steps`
    (QSGD, Alistarh et al. 2017, section 3.1). A scale of 0 gives the code of zero everywhere; one that `checked_scale`
    passed does not overflow.
    """
    codes = np.empty(v.size, code_type((2 * steps).bit_length()))
    if scale == 0.0:
        codes.fill(steps)
        return codes
    if lib is not None and v.dtype == np.float32 and v.flags.c_contiguous:
        source, words = kernel_source(uniforms, v, "float[]")
        lib.stochastic_codes(
            pointer(v, "float[]"), v.size, steps, scale, source, *words,
            codes.itemsize, pointer(codes, "uint8_t[]"),
        )  # fmt: skip
        return codes
    exact = np.abs(v)
    exact *= v.dtype.type(steps)
    exact /= v.dtype.type(scale)
    level = np.floor(exact)
    exact -= level
    level += drawn_from(uniforms, v.size, v.dtype) < exact
    np.minimum(level, v.dtype.type(steps), out=level)
    np.copysign(level, v, out=level)
    level += v.dtype.type(steps)
    np.copyto(codes, level, casting="unsafe")
    return codes


def stochastic_codes_of_each(
    v: FloatArray, sizes: npt.NDArray[np.int64], scales: npt.NDArray[np.float64], steps: int, stream: Stream
) -> CodeArray:
    """Return `stochastic_codes` of float32 layers that follow one another, each with the stream of its number in the
    place of that of `stream`; for the kernels alone."""
    assert lib is not None
    codes = np.empty(v.size, code_type((2 * steps).bit_length()))
    key0, key1, _, round_ = stream.counter
    lib.stochastic_codes_of_each(
        pointer(v, "float[]"), pointer(sizes, "int64_t[]"), sizes.size, steps, pointer(scales, "double[]"), key0, key1,
        round_, codes.itemsize, pointer(codes, "uint8_t[]"),
    )  # fmt: skip
    return codes


@overload
def drawn_from(uniforms: Uniforms, size: int, dtype: np.dtype[Any], start: int = 0) -> FloatArray: ...
@overload
def drawn_from(uniforms: Uniforms | None, size: int, dtype: np.dtype[Any], start: int = 0) -> FloatArray | None: ...
def drawn_from(uniforms: Uniforms | None, size: int, dtype: np.dtype[Any], start: int = 0) -> FloatArray | None:
    """Return uniforms, float[size], or None of None; of a stream those from number `start` on."""
    if isinstance(uniforms, Stream):
        return uniforms.uniforms(size, dtype, start)
    if uniforms is not None and (uniforms.shape != (size,) or uniforms.dtype != dtype):
        raise ValueError(f"{size} uniforms of {dtype} are needed, not {uniforms.size} of {uniforms.dtype}")
    return uniforms


def kernel_source(uniforms: Uniforms | None, v: FloatArray, real: str) -> tuple[CData, tuple[int, int, int, int]]:
    """Return a pointer to uniforms for `v`, or NULL and the names of the stream to draw them from."""
    if isinstance(uniforms, Stream):
        return ffi.NULL, uniforms.counter
    drawn = drawn_from(uniforms, v.size, v.dtype)
    return pointer(None if drawn is None else np.ascontiguousarray(drawn), real), (0, 0, 0, 0)


def nearest_levels(v: FloatArray, bits: int, layer: int) -> Levels:
    """Return the values `v` on a symmetric grid of `bits` bits, the sign included, rounded to nearest.

    One bit: ± mean |v|. More: the 2·L + 1 multiples of scale/L from −scale to scale, L = 2^(bits−1) − 1, zero among
    them. With zero among the levels no coordinate ends further from its value than zero is, so the error never exceeds
    the vector whatever its distribution, and error feedback stays stable; a grid without zero would use the one code
    that this leaves idle, but turn values far below the scale into ± half a step, larger than they were. Clipping has
    the same property, so of the scales max |v| · 2^(−i/4), i = 0 … 11, the one with the smallest squared error is
    taken, the largest of equal ones: under heavy tails, as gradients have them, max |v| would spend nearly all levels
    on a few values. Deterministic, because error feedback sends the rounding error.
    """
    if bits == 1:
        mean = checked_scale(sum_of_magnitudes(v) / v.size, 1, v.dtype, layer)
        return Levels(mean, divisor=1, base=-1, step=2, bits=1, codes=(v >= 0).view(np.uint8))
    steps = 2 ** (bits - 1) - 1
    largest = checked_scale(max_magnitude(v), steps, v.dtype, layer)
    best, best_scale, tiny = math.inf, 0.0, float(np.finfo(v.dtype).tiny)
    best_codes: CodeArray = np.full(v.size, steps, code_type(bits))
    codes = np.empty_like(best_codes)
    for i in range(_SCALES):
        scale = float(v.dtype.type(largest * float(_SHRINKS[i])))
        if scale < tiny * steps:
            # A step of this scale would be denormal, or the layer is zero.
            break
        error = _nearest_codes(v, scale, steps, codes)
        if error < best:
            best, best_scale = error, scale
            best_codes, codes = codes, best_codes
    return Levels(best_scale, divisor=steps, base=-steps, step=1, bits=bits, codes=best_codes)


def four_levels(v: FloatArray, layer: int) -> Levels:
    """Return the values `v` rounded to ±s and ±3s, whichever is nearest, with the s of the smallest squared error.

    Two bits without zero, for numbers that were chosen because they are large: under heavy tails, −s, 0 and s of
    `nearest_levels` round most of them to zero. The error is never above that of one bit, the case in which no number
    is at 3s.
    """
    magnitudes = np.sort(np.abs(v))[::-1].astype(np.float64)
    largest = np.concatenate(([0.0], np.cumsum(magnitudes)))
    # With the j largest at 3s the best s is their total over their weight, and takes total²/weight off Σ v².
    totals, weights = largest[-1] + 2.0 * largest, v.size + 8.0 * np.arange(v.size + 1)
    best = int(np.argmax(totals / np.sqrt(weights)))
    scale = checked_scale(totals[best] / weights[best], 3, v.dtype, layer)
    is_large = np.abs(v) >= v.dtype.type(2.0 * scale)
    codes = np.where(v < 0, 1 - is_large, 2 + is_large).astype(np.uint8)
    return Levels(scale, divisor=1, base=-3, step=2, bits=2, codes=codes)


def four_levels_of_each(
    v: FloatArray, counts: npt.NDArray[np.int64]
) -> tuple[tuple[int, int, int, int], npt.NDArray[np.float64], CodeArray]:
    """Return what `nearest_levels_of_each` does, of `four_levels`."""
    each = [four_levels(part, layer) for layer, part in enumerate(np.split(v, np.cumsum(counts)[:-1]))]
    return (1, -3, 2, 2), np.array([part.scale for part in each]), np.concatenate([part.codes for part in each])


_SCALES = 12
_SHRINKS = np.array([2.0 ** (-i / 4) for i in range(_SCALES)])


def nearest_levels_of_each(
    v: FloatArray, counts: npt.NDArray[np.int64], bits: int
) -> tuple[tuple[int, int, int, int], npt.NDArray[np.float64], CodeArray] | None:
    """Return the parameters, the scale of each layer and the codes of `nearest_levels` for layers that follow one
    another in `v`, with `counts` numbers each. None if the kernels were not built or do not take `v`, or if a layer is
    faulty."""
    if lib is None or v.dtype != np.float32 or not v.flags.c_contiguous:
        return None
    scales, steps = np.empty(counts.size), 2 ** (bits - 1) - 1
    room = 0 if bits == 1 else 2 * int(counts.max())
    codes = np.empty(v.size + room, code_type(bits))
    layers = pointer(v, "float[]"), pointer(counts, "int64_t[]"), counts.size
    target = pointer(codes, "uint8_t[]"), pointer(scales, "double[]")
    if bits == 1:
        parameters, failed = (1, -1, 2, 1), lib.signs_of_each(*layers, *target)
    else:
        parameters = steps, -steps, 1, bits
        failed = lib.nearest_levels_of_each(
            *layers, steps, pointer(_SHRINKS, "double[]"), _SCALES, codes.itemsize, *target
        )
    return None if failed >= 0 else (parameters, scales, codes[: v.size])


def _nearest_codes(v: FloatArray, scale: float, steps: int, codes: CodeArray) -> float:
    """Write the codes nearest to `v` on the levels up to `scale`; return the sum of their squared errors."""
    if lib is not None and v.dtype == np.float32 and v.flags.c_contiguous:
        target = pointer(codes, "uint8_t[]")
        return float(lib.nearest_codes(pointer(v, "float[]"), v.size, scale, steps, codes.itemsize, target))
    real = v.dtype.type
    ratio = v / real(scale)
    np.clip(ratio, real(-1), real(1), out=ratio)
    ratio *= real(steps)
    np.rint(ratio, out=ratio)
    np.copyto(codes, ratio + real(steps), casting="unsafe")
    ratio *= real(scale)
    ratio /= real(steps)
    ratio -= v
    return sum_of_squares(ratio)


def grid_multiples(v: FloatArray, step: float, uniforms: Uniforms | None) -> tuple[FloatArray, float, float]:
    """Return `v` rounded to multiples of `step`, as multiples, float[n], and the lowest and highest of them.

    With uniforms ⌊v/step⌋, plus one if the uniform is at most the fraction; without, ⌊v/step + ½⌋. If v/step is beyond
    the range of the type, the multiple is infinite.
    """
    if lib is not None and v.dtype == np.float32 and v.flags.c_contiguous:
        multiples: FloatArray = np.empty_like(v)
        source, words = kernel_source(uniforms, v, "float[]")
        ends = ffi.new("float[2]")
        lib.grid_multiples(
            pointer(v, "float[]"), v.size, step, uniforms is not None, source, *words,
            pointer(multiples, "float[]"), ends,
        )  # fmt: skip
        return multiples, ends[0], ends[1]
    with np.errstate(over="ignore", invalid="ignore"):
        multiples = v / v.dtype.type(step)
        if uniforms is None:
            multiples += v.dtype.type(0.5)
            np.floor(multiples, out=multiples)
        else:
            down = np.floor(multiples)
            multiples -= down
            down += drawn_from(uniforms, v.size, v.dtype) <= multiples
            multiples = down
    return multiples, float(multiples.min()), float(multiples.max())
