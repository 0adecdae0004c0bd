"""Equally spaced levels: choosing codes on the sender's side, computing values on everyone's."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from peer.compress.norms import max_magnitude, sum_of_magnitudes, sum_of_squares
from peer.compress.payload import FloatArray, Levels
from peer.errors import RemoteProtocolError
from peer.native import ffi, lib
from peer.random import Stream

CodeArray = npt.NDArray[np.unsignedinteger[Any]]

_LARGEST_INTEGER = 2**53


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


def stochastic_codes(v: FloatArray, scale: float, steps: int, uniforms: FloatArray | Stream) -> CodeArray:
    """Return codes of the levels −scale … scale in `2 · steps + 1` values: `steps + sign(v_i) · level_i`.

    level = ⌊steps |v|/scale⌋, plus one if the uniform is **below** the fractional part, never above `steps`
    (QSGD, Alistarh et al. 2017, section 3.1). A scale of 0 gives the code of zero everywhere.
    """
    codes = np.empty(v.size, code_type((2 * steps).bit_length()))
    if scale == 0.0:
        codes.fill(steps)
        return codes
    # steps · |v| must not overflow; a power of two changes no digit.
    shrink = 1.0 if scale < float(np.finfo(v.dtype).max) / 1024 else 2.0**-10
    if lib is not None and v.dtype == np.float32 and v.flags.c_contiguous:
        drawn, words = _uniform_arguments(uniforms, v)
        lib.stochastic_codes(
            ffi.from_buffer("float[]", v), v.size, shrink, steps, scale * shrink, drawn, *words,
            codes.itemsize, ffi.from_buffer("uint8_t[]", codes),
        )  # fmt: skip
        return codes
    drawn = uniforms.uniforms(v.size, v.dtype) if isinstance(uniforms, Stream) else uniforms
    return _stochastic_codes_numpy(v, v.dtype.type(scale * shrink), shrink, steps, drawn, codes)


def _stochastic_codes_numpy(
    v: FloatArray, scale: Any, shrink: float, steps: int, uniforms: FloatArray, codes: CodeArray
) -> CodeArray:
    exact = np.abs(v)
    exact *= v.dtype.type(shrink)
    exact *= v.dtype.type(steps)
    exact /= scale
    level = np.floor(exact)
    exact -= level
    level += uniforms < exact
    np.minimum(level, v.dtype.type(steps), out=level)
    np.copysign(level, v, out=level)
    level += v.dtype.type(steps)
    np.copyto(codes, level, casting="unsafe")
    return codes


def _uniform_arguments(uniforms: FloatArray | Stream, v: FloatArray) -> tuple[Any, tuple[int, int, int, int]]:
    """Return a pointer to uniforms, or NULL and the names of the stream to draw them from."""
    if isinstance(uniforms, Stream):
        return ffi.NULL, uniforms.counter
    if uniforms.shape != v.shape or uniforms.dtype != v.dtype:
        raise ValueError(f"{v.size} uniforms of {v.dtype} are needed, not {uniforms.size} of {uniforms.dtype}")
    return ffi.from_buffer("float[]", np.ascontiguousarray(uniforms)), (0, 0, 0, 0)


def nearest_levels(v: FloatArray, bits: int) -> Levels:
    """Return the values `v` on a symmetric grid of `bits` bits, the sign included, rounded to nearest.

    One bit: ± mean |v|. More: the 2·L + 1 multiples of scale/L from −scale to scale, L = 2^(bits−1) − 1, zero among them. With
    zero among the levels no coordinate can end further from its value than zero is, so whatever the distribution
    the error never exceeds the vector and error feedback stays stable; a grid without zero saves the one code
    that this leaves unused, but turns values far below the scale into ± half a step, larger than they were.
    Clipping has the same property, so of the scales max |v| · 2^(−i/4), i = 0 … 11, the one with the
    smallest squared error is taken, the largest of equal ones: heavy tails, as gradients have, would otherwise spend nearly all
    levels on a few values. Deterministic, because error feedback sends what rounding left.
    """
    if bits == 1:
        scale = v.dtype.type(sum_of_magnitudes(v) / v.size)
        return Levels(float(scale), divisor=1, base=-1, step=2, bits=1, codes=(v >= 0).view(np.uint8))
    steps = 2 ** (bits - 1) - 1
    largest = max_magnitude(v)
    best: tuple[float, Levels] | None = None
    for i in range(12):
        scale = v.dtype.type(largest * 2.0 ** (-i / 4))
        if best is not None and scale < np.finfo(v.dtype).tiny * steps:
            break
        levels = Levels(float(scale), steps, -steps, 1, bits, _nearest_codes(v, scale, steps, bits))
        error = level_values(levels, v.dtype)
        error -= v
        squares = sum_of_squares(error)
        if best is None or squares < best[0]:
            best = squares, levels
    assert best is not None
    return best[1]


def _nearest_codes(v: FloatArray, scale: Any, steps: int, bits: int) -> CodeArray:
    if scale == 0:
        return np.full(v.size, steps, code_type(bits))
    ratio = v / scale
    np.clip(ratio, -1, 1, out=ratio)
    ratio *= v.dtype.type(steps)
    np.rint(ratio, out=ratio)
    ratio += v.dtype.type(steps)
    return ratio.astype(code_type(bits))


def grid_multiples(v: FloatArray, step: float, uniforms: FloatArray | Stream | None) -> tuple[FloatArray, float, float]:
    """Return the multiples of `step` that `v` is rounded to, float[n], and the lowest and highest of them.

    With uniforms ⌊v/step⌋, plus one if the uniform is at most the fraction; without, ⌊v/step + ½⌋. Where v/step is
    beyond the range of the type, the multiple is infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        multiples: FloatArray = v / v.dtype.type(step)
        if uniforms is None:
            multiples += v.dtype.type(0.5)
            np.floor(multiples, out=multiples)
        else:
            drawn = uniforms.uniforms(v.size, v.dtype) if isinstance(uniforms, Stream) else uniforms
            down = np.floor(multiples)
            multiples -= down
            down += drawn <= multiples
            multiples = down
    return multiples, float(multiples.min()), float(multiples.max())
