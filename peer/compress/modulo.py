"""Moniqua's modulo code (Lu and De Sa, "Moniqua: Modulo quantized communication in decentralized SGD", ICML 2020).

A peer sends only the low bits of the integers K to which its weights round; a receiver whose own weights are within θ
knows the rest. With L = 2^bits levels, B = 2θ/(1 − 2δ) and ω uniform in [0, 1):

    rounding     K               value of K             δ
    nearest      ⌊L x/B⌋         (K + ½) · B/L          1/(2L)
    stochastic   ⌊L x/B + ω⌋     K · B/L                1/L
    dither       ⌊L x/B + ω⌋     (K + ½ − ω) · B/L      1/(2L)

Everything is computed in the vector's own float type, in this order: x/B, times L (exact), plus ω, floor; K as a float,
plus ½ or plus (½ − ω), times (B/L); B itself in float64 from θ (which is rounded to the vector's type first), then
rounded. An integer becomes a number in this one way, for the sender's own term, for receivers and after a repair: peers
with the same K and ω have the same bits. Recovery therefore means recovering K: of the integers with the received
residue, the one whose value lies in [y − B/2, y + B/2), which is the paper's `((qB − y) mod B) + y`.

The hash that tells a receiver whether it recovered the right K is XXH3-64 with seed 0 over the integers of the layer
as int64, little-endian.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from peer.compress.base import Draws, ErrorBound, shared_uniforms
from peer.compress.columns import RESIDUES, Columns
from peer.compress.layout import Layout
from peer.compress.levels import CodeArray, Uniforms, code_type, drawn_from, kernel_source
from peer.compress.magnitude import max_magnitude
from peer.compress.norms import NotFiniteError, not_finite
from peer.compress.payload import FloatArray, MoreBits, Payload, Residues, Rounding, WholeIntegers
from peer.compress.settings import BY_ALGORITHM, require_flag, require_positive, require_whole
from peer.errors import LOWER_RATE, DivergenceError, RemoteProtocolError
from peer.native import lib, pointer
from peer.random import PeerDraws

Omega = Uniforms | None
"""ω: uniforms of the layer, or the stream from which they are drawn, or None for `nearest`."""

IntegerArray = npt.NDArray[np.int64]

_CHUNK = 1 << 15
_MOST_AT_ONCE = 1 << 20
"""Integers K that are held at once for their hashes."""
MOST_KNOWN_BITS = 52
"""Low bits of K that residues and repairs may hold together; beyond these, only all of K can be sent."""


class CodeRangeError(DivergenceError, ValueError):
    """θ is so small compared with the weights that the integers of the code no longer hold their low bits."""


class ThetaTooSmall(RemoteProtocolError):
    """θ of a neighbour's code is too small, compared with the receiver's weights, to read the code against them."""


def delta(bits: int, rounding: Rounding) -> float:
    """Return δ: the error of a recovered value is at most δ · B."""
    return (1.0 if rounding is Rounding.STOCHASTIC else 0.5) / (1 << bits)


def modulus(theta: float, bits: int, rounding: Rounding) -> float:
    """Return B = 2θ/(1 − 2δ), in float64."""
    return 2.0 * theta / (1.0 - 2.0 * delta(bits, rounding))


@lru_cache
def largest_integer(dtype: np.dtype[Any]) -> int:
    """Return the largest |K| at which the type still holds the residue: 2^23 in float32, 2^52 in float64."""
    return int(2 ** np.finfo(dtype).nmant)


@lru_cache(maxsize=1024)
def _held_modulus(theta: float, bits: int, rounding: Rounding, dtype: np.dtype[Any]) -> float | None:
    """Return B as the type holds it, or None if it or a level leaves the type's range. Layers often share a θ."""
    with np.errstate(over="ignore"):
        b = float(dtype.type(modulus(float(dtype.type(theta)), bits, rounding)))
    return b if math.isfinite(b) and b / (1 << bits) >= float(np.finfo(dtype).tiny) else None


def theta_floor(largest: float, bits: int, rounding: Rounding, dtype: npt.DTypeLike) -> float:
    """Return the smallest θ for a layer with the largest magnitude `largest`: it leaves one bit of K to spare.

    Rules that let θ shrink with the consensus distance take the larger of both: a larger θ is always correct.
    """
    kind = np.finfo(np.dtype(dtype))
    needed = 2.0 * (1 << bits) * largest / largest_integer(np.dtype(dtype))
    return max(needed, 4.0 * (1 << bits) * float(kind.tiny)) * (1.0 - 2.0 * delta(bits, rounding)) / 2.0


@dataclass(frozen=True)
class ModuloCode:
    """The code with its two settings; θ changes from round to round and is an argument."""

    bits: int
    rounding: Rounding

    def __post_init__(self) -> None:
        require_whole("bits", self.bits, 1, 16)
        if self.rounding is Rounding.STOCHASTIC and self.bits < 2:
            raise ValueError(
                "bits is at least 2 for a modulo code with stochastic rounding (its δ has to stay below ½); "
                "at 1 bit use rounding 'nearest' or 'dither'"
            )

    def encode(self, x: FloatArray, theta: float, omega: Omega = None) -> IntegerArray:
        """Return K, int64[n].

        Raises CodeRangeError if |K| exceeds `largest_integer`, ValueError for a bad θ or x.
        """
        integers = np.empty(x.size, np.int64)
        self._encode(x, self._modulus(theta, x.dtype, ValueError), omega, 0, integers=integers)
        return integers

    def payload(self, x: FloatArray, theta: float, omega: Omega = None, *, verified: bool = False) -> Residues:
        """Return the residues of x with θ as the vector's type holds it, and in verified mode the hash of K."""
        b = self._modulus(theta, x.dtype, ValueError)
        theta = float(x.dtype.type(theta))
        residues = np.empty(x.size, code_type(self.bits))
        if not verified:
            self._encode(x, b, omega, 0, residues=residues)
            return Residues(theta, self.bits, self.rounding, residues, None)
        hasher, integers = xxhash.xxh3_64(), np.empty(min(_CHUNK, x.size), np.int64)
        for start in range(0, x.size, _CHUNK):
            part = slice(start, min(start + _CHUNK, x.size))
            chunk = integers[: part.stop - start]
            self._encode(x[part], b, _part(omega, part), start, integers=chunk, residues=residues[part])
            hasher.update(_little_endian(chunk))
        return Residues(theta, self.bits, self.rounding, residues, hasher.intdigest())

    def values(
        self, integers: IntegerArray, theta: float, omega: Omega, dtype: npt.DTypeLike, out: FloatArray | None = None
    ) -> FloatArray:
        """Return the number that K stands for: the canonical x̂ (see the module docstring)."""
        kind: np.dtype[Any] = np.dtype(dtype)
        b = self._modulus(theta, kind, RemoteProtocolError)
        result: FloatArray = np.empty(integers.size, kind) if out is None else out
        np.copyto(result, integers, casting="unsafe")
        offset = self._offset(drawn_from(self._needed(omega), integers.size, kind), kind)
        if offset is not None:
            result += offset
        result *= kind.type(b / (1 << self.bits))
        return result

    def own_value(self, x: FloatArray, theta: float, omega: Omega = None, out: FloatArray | None = None) -> FloatArray:
        """Return x̂ of the sender itself, to the bit that of every receiver that recovers K."""
        result = np.empty_like(x) if out is None else out
        _require_like(result, x)
        self._encode(x, self._modulus(theta, x.dtype, ValueError), omega, 0, values=result)
        return result

    def _modulus(self, theta: float, dtype: np.dtype[Any], error: type[Exception]) -> float:
        """Return B as the type holds it; raise `error` if θ is no usable number."""
        if not (math.isfinite(theta) and theta > 0.0):
            raise error(f"θ of a modulo code is a number above 0, not {theta}")
        b = _held_modulus(theta, self.bits, self.rounding, dtype)
        if b is None:
            raise error(f"θ = {theta:g} leaves the range of {dtype} with {self.bits} bits")
        return b

    def _needed(self, omega: Omega) -> Omega:
        """Return ω as this rounding uses it: None for nearest, never None otherwise."""
        if self.rounding is Rounding.NEAREST:
            return None
        if omega is None:
            raise ValueError(f"a modulo code with {self.rounding.name.lower()} rounding needs its uniforms ω")
        return omega

    def _offset(self, omega: FloatArray | None, dtype: np.dtype[Any]) -> Any:
        """Return the offset added to K before it is scaled; None for nothing."""
        if self.rounding is Rounding.STOCHASTIC:
            return None
        return dtype.type(0.5) if omega is None else dtype.type(0.5) - omega

    def _encode(
        self,
        x: FloatArray,
        b: float,
        omega: Omega,
        start: int,
        *,
        integers: IntegerArray | None = None,
        residues: CodeArray | None = None,
        values: FloatArray | None = None,
    ) -> None:
        """Write K, its residues or its values, as requested. `start` is the first coordinate's number."""
        omega = self._needed(omega)
        arrays = [array for array in (x, integers, residues, values) if array is not None]
        if lib is None or not all(array.flags.c_contiguous for array in arrays):
            drawn = drawn_from(omega, x.size, x.dtype, start)
            fits = self._encode_numpy(x, b, drawn, integers, residues, values)
        else:
            single = x.dtype == np.float32
            real, kernel = ("float[]", lib.modulo_encode_f32) if single else ("double[]", lib.modulo_encode_f64)
            source, words = kernel_source(omega, x, real)
            width = 1 if residues is None else residues.itemsize
            fits = bool(
                kernel(
                    pointer(x, real), x.size, b, self.bits, int(self.rounding), largest_integer(x.dtype), source,
                    start, *words, pointer(integers, "int64_t[]"), width, pointer(residues, "uint8_t[]"),
                    pointer(values, real),
                )
            )  # fmt: skip
        if fits:
            return
        if not math.isfinite(max_magnitude(x)):
            raise NotFiniteError(f"the model holds values that are not finite; {LOWER_RATE}")
        floor = theta_floor(max_magnitude(x), self.bits, self.rounding, x.dtype)
        raise CodeRangeError(
            f"θ is too small for {self.bits}-bit modulo codes of weights up to {max_magnitude(x):.3g}: "
            f"use at least {floor:.3g}"
        )

    def _encode_numpy(
        self,
        x: FloatArray,
        b: float,
        omega: FloatArray | None,
        integers: IntegerArray | None,
        residues: CodeArray | None,
        values: FloatArray | None,
    ) -> bool:
        real = x.dtype.type
        with np.errstate(over="ignore", invalid="ignore"):
            k = x / real(b)
            k *= real(1 << self.bits)
            if omega is not None:
                k += omega
            np.floor(k, out=k)
            if not np.all(np.abs(k) <= real(largest_integer(x.dtype))):
                return False
        whole = k.astype(np.int64) if integers is None else integers
        if integers is not None:
            np.copyto(integers, k, casting="unsafe")
        if residues is not None:
            np.copyto(residues, whole & ((1 << self.bits) - 1), casting="unsafe")
        if values is not None:
            offset = self._offset(omega, x.dtype)
            if offset is not None:
                k += offset
            np.multiply(k, real(b / (1 << self.bits)), out=values)
        return True


def recover(payload: Residues, y: FloatArray, omega: Omega = None, out: FloatArray | None = None) -> FloatArray:
    """Return the sender's x̂, float[n] in the type of the reference `y`; right wherever |x − y| < θ.

    Raises ThetaTooSmall if θ cannot be meant for this reference.
    """
    result = np.empty_like(y) if out is None else out
    _recover(payload, y, omega, 0, None, result)
    return result


def recover_checked(
    payload: Residues, y: FloatArray, omega: Omega = None, out: FloatArray | None = None
) -> tuple[FloatArray, bool]:
    """Return the sender's x̂ and whether the recovered K has the hash that the payload carries.

    False means that θ was too small for this layer, and that x̂ must be repaired before use. Raises ThetaTooSmall if no
    bits beyond the low ones help.
    """
    if payload.check is None:
        raise RemoteProtocolError("a modulo code came without the hash that verified mode needs")
    result = np.empty_like(y) if out is None else out
    hasher, integers = xxhash.xxh3_64(), np.empty(min(_CHUNK, y.size), np.int64)
    for start in range(0, y.size, _CHUNK):
        part = slice(start, min(start + _CHUNK, y.size))
        chunk = integers[: part.stop - start]
        piece = Residues(payload.theta, payload.bits, payload.rounding, payload.residues[part], None)
        _recover(piece, y[part], _part(omega, part), start, chunk, result[part])
        hasher.update(_little_endian(chunk))
    return result, hasher.intdigest() == payload.check


def require_readable(payload: Residues, dtype: npt.DTypeLike) -> None:
    """Raise RemoteProtocolError if no vector of the type can have these residues."""
    _code_of(payload.bits, payload.rounding)._modulus(payload.theta, np.dtype(dtype), RemoteProtocolError)


def recover_all(
    payload: Payload, y: FloatArray, layout: Layout, draws: Draws, out: FloatArray, *, verified: bool
) -> bool:
    """Write the sender's x̂ of all layers to `out`, as `recover` does for each or, verified, `recover_checked`, and
    return True; or False if a layer was not recovered, and has to be handled by itself, or if the kernels do not take
    the payload."""
    if not isinstance(payload, Columns) or payload.residues is None or bool(payload.has_reals.any()):
        return False
    _require_like(out, y)
    bits, rounding = payload.residues
    sizes = layout.size_array
    checks = payload.checks if verified else None
    if not np.array_equal(payload.sizes, sizes) or (verified and (checks is None or layout.size > _MOST_AT_ONCE)):
        return False
    call = _for_all(_code_of(bits, rounding), y, payload.scalars, draws)
    if call is None or lib is None or not out.flags.c_contiguous:
        return False
    _, moduli, words = call
    integers = None if checks is None else np.empty(y.size, np.int64)
    failed = lib.modulo_recover_of_each(
        pointer(payload.codes, "uint8_t[]"), payload.codes.itemsize, pointer(y, "float[]"),
        pointer(sizes, "int64_t[]"), sizes.size, pointer(moduli, "double[]"), bits, int(rounding),
        2 * largest_integer(y.dtype), *words, pointer(integers, "int64_t[]"), pointer(out, "float[]"),
    )  # fmt: skip
    return failed < 0 and (integers is None or checks is None or np.array_equal(_hashes(integers, layout), checks))


def _for_all(
    code: ModuloCode, v: FloatArray, thetas: npt.NDArray[np.float64], draws: Draws
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], tuple[int, int, int]] | None:
    """Return θ and B of each layer as float32 holds them, and the words of the stream of ω but for the layer's; None if
    the kernels do not take `v`, or a θ is no usable number."""
    if not isinstance(draws, PeerDraws) or v.dtype != np.float32 or not v.flags.c_contiguous:
        return None
    with np.errstate(over="ignore"):
        held = thetas.astype(np.float32).astype(np.float64)
    found = {
        theta: _held_modulus(theta, code.bits, code.rounding, v.dtype) for theta in set(held.tolist()) if theta > 0
    }
    if not np.isfinite(held).all() or len(found) != len(set(held.tolist())) or None in found.values():
        return None
    moduli = np.array([found[theta] for theta in held.tolist()], np.float64)
    key0, key1, _, round_ = draws.shared_stream(0).counter
    return held, moduli, (key0, key1, round_)


def _hashes(integers: IntegerArray, layout: Layout) -> npt.NDArray[np.uint64]:
    """Return `hash_integers` of each layer: uint64[layers]."""
    return np.array([hash_integers(integers[part]) for part in layout.slices], np.uint64)


def hash_integers(integers: IntegerArray) -> int:
    """Return XXH3-64, seed 0, of K as little-endian int64."""
    return xxhash.xxh3_64_intdigest(_little_endian(np.ascontiguousarray(integers)))


def more_bits(integers: IntegerArray, low: int, bits: int) -> MoreBits:
    """Return bits `low` to `low + bits − 1` of K, 1 to 16 of them."""
    require_whole("bits of a repair", bits, 1, 16)
    return MoreBits(low, bits, ((integers >> low) & ((1 << bits) - 1)).astype(code_type(bits)))


def apply_repair(
    first: Residues, repairs: Sequence[MoreBits | WholeIntegers], y: FloatArray, omega: Omega = None
) -> IntegerArray:
    """Return K from its residues and the further bits that came since, against the same reference `y` and ω.

    Each repair multiplies B and L by 2^bits and leaves the integers as they are: nothing is quantized anew. The caller
    compares `hash_integers` of the result with `first.check`, and takes `values_of` it for x̂. Raises
    RemoteProtocolError if the repairs do not continue each other, ThetaTooSmall if only all of K helps.
    """
    code = _code_of(first.bits, first.rounding)
    if repairs and isinstance(repairs[-1], WholeIntegers):
        integers = repairs[-1].integers
        if integers.shape != y.shape:
            raise RemoteProtocolError(f"a repair has {integers.size} integers for a layer of {y.size}")
        if integers.size and max(-int(integers.min()), int(integers.max())) > largest_integer(y.dtype):
            raise RemoteProtocolError(f"a repair has integers above {largest_integer(y.dtype)}")
        return integers
    known, total = first.residues.astype(np.int64), first.bits
    if known.shape != y.shape:
        raise RemoteProtocolError(f"a modulo code has {known.size} residues for a layer of {y.size}")
    for repair in repairs:
        if not isinstance(repair, MoreBits) or repair.low != total or repair.codes.shape != y.shape:
            raise RemoteProtocolError(f"a repair does not continue the {total} bits that are known")
        known += repair.codes.astype(np.int64) << total
        total += repair.bits
        if total > MOST_KNOWN_BITS:
            raise RemoteProtocolError(f"a repair by {total} bits: beyond {MOST_KNOWN_BITS} all of K has to be sent")
    b = code._modulus(first.theta, y.dtype, RemoteProtocolError)
    offset = code._offset(drawn_from(code._needed(omega), y.size, y.dtype), y.dtype)
    # In float64 whatever the vector's type: a repair is rare, and its high bits need the room.
    turns = y.astype(np.float64) / b * (1 << code.bits)
    if not np.all(np.abs(turns) <= 2.0**MOST_KNOWN_BITS):
        raise ThetaTooSmall(f"θ = {first.theta:g} is too small for the receiver's weights")
    turns -= known
    if offset is not None:
        turns -= offset
    wraps = np.ceil(turns / (1 << total) - 0.5).astype(np.int64)
    return known + (wraps << total)


def values_of(
    first: Residues, integers: IntegerArray, omega: Omega, dtype: npt.DTypeLike, out: FloatArray | None = None
) -> FloatArray:
    """Return x̂ of repaired integers, with the settings of their payload."""
    return _code_of(first.bits, first.rounding).values(integers, first.theta, omega, dtype, out)


@dataclass(frozen=True, kw_only=True)
class Modulo:
    """The modulo code as a compressor. Its payload can only be read against the receiver's own vector (`recover`)."""

    kind: ClassVar[str] = "modulo"
    summary: ClassVar[str] = "Moniqua's residues, 1 to 16 bits, for the modulo algorithms only"
    needs_reference: ClassVar[bool] = True

    bits: int
    rounding: Rounding = Rounding.DITHER
    theta: float | None = field(default=None, metadata=BY_ALGORITHM)
    """A constant θ, for callers that give none."""
    verified: bool = field(default=False, metadata=BY_ALGORITHM)
    """Carry the hash of K."""

    def __post_init__(self) -> None:
        if not isinstance(self.rounding, Rounding):
            raise ValueError(f"rounding is nearest, stochastic or dither, not {self.rounding!r}")
        require_flag("verified", self.verified)
        if self.theta is not None:
            require_positive("theta", self.theta)
        ModuloCode(self.bits, self.rounding)

    @property
    def unbiased(self) -> bool:
        return self.rounding is not Rounding.NEAREST

    @property
    def code(self) -> ModuloCode:
        return _code_of(self.bits, self.rounding)

    def omega(self, v: FloatArray, layer: int, draws: Draws) -> Omega:
        """Return the ω of a layer: the same for every peer, None if the rounding needs none."""
        return None if self.rounding is Rounding.NEAREST else shared_uniforms(draws, layer, v)

    def compress(self, v: FloatArray, layer: int, draws: Draws, theta: float | None = None) -> Residues:
        """Return the residues of `v`. `theta` bounds |v − y| for every receiver's y; None takes the setting."""
        used = self.theta if theta is None else theta
        if used is None:
            raise ValueError("a modulo code needs θ: give theta a number above 0")
        try:
            return self.code.payload(v, used, self.omega(v, layer, draws), verified=self.verified)
        except ValueError:
            if not math.isfinite(max_magnitude(v)):
                raise not_finite(layer) from None
            raise

    def compress_all(
        self, v: FloatArray, layout: Layout, draws: Draws, thetas: npt.NDArray[np.float64] | None = None
    ) -> Columns | None:
        """Return the results of `compress` for all layers, at once if that is faster, or None.

        `thetas: float64[layers]`; None takes the setting.
        """
        if thetas is None and self.theta is not None:
            thetas = np.full(layout.num_layers, self.theta)
        # In verified mode all of K is held, for its hashes.
        if thetas is None or (self.verified and layout.size > _MOST_AT_ONCE):
            return None
        call = _for_all(self.code, v, thetas, draws)
        if call is None or lib is None:
            return None
        held, moduli, words = call
        integers = np.empty(v.size, np.int64) if self.verified else None
        residues = np.empty(v.size, code_type(self.bits))
        failed = lib.modulo_encode_of_each(
            pointer(v, "float[]"), pointer(layout.size_array, "int64_t[]"), layout.num_layers,
            pointer(moduli, "double[]"), self.bits, int(self.rounding), largest_integer(v.dtype), *words,
            pointer(integers, "int64_t[]"), residues.itemsize, pointer(residues, "uint8_t[]"),
        )  # fmt: skip
        if failed >= 0:
            # Layer by layer the error names the one that is to blame.
            return None
        return Columns(
            sizes=layout.size_array, forms=np.full(layout.num_layers, RESIDUES, np.uint8), counts=layout.size_array,
            scalars=held, codes=residues, residues=(self.bits, self.rounding),
            checks=None if integers is None else _hashes(integers, layout),
        )  # fmt: skip

    def bits_per_value(self, size: int) -> float:
        return self.bits + (64.0 / size if self.verified else 0.0)

    def error_bound(self, size: int) -> ErrorBound:
        if self.theta is None:
            return ErrorBound()
        settings = self.bits, self.rounding
        return ErrorBound(absolute=delta(*settings) * modulus(self.theta, *settings))


@lru_cache
def _code_of(bits: int, rounding: Rounding) -> ModuloCode:
    try:
        return ModuloCode(bits, rounding)
    except ValueError as error:
        raise RemoteProtocolError(f"a modulo code that cannot be: {error}") from None


def _recover(
    payload: Residues,
    y: FloatArray,
    omega: Omega,
    start: int,
    integers: IntegerArray | None,
    values: FloatArray | None,
) -> None:
    """Write the recovered K and its values, as requested."""
    code = _code_of(payload.bits, payload.rounding)
    _require_like(values, y)
    if payload.residues.shape != y.shape or payload.residues.dtype != code_type(payload.bits):
        raise RemoteProtocolError(f"a modulo code has {payload.residues.size} residues for a layer of {y.size}")
    b = code._modulus(payload.theta, y.dtype, RemoteProtocolError)
    omega, residues = code._needed(omega), payload.residues
    arrays = [array for array in (residues, y, integers, values) if array is not None]
    if lib is None or not all(array.flags.c_contiguous for array in arrays):
        drawn = drawn_from(omega, y.size, y.dtype, start)
        fits = _recover_numpy(code, b, residues, y, drawn, integers, values)
    else:
        single = y.dtype == np.float32
        real, kernel = ("float[]", lib.modulo_recover_f32) if single else ("double[]", lib.modulo_recover_f64)
        source, words = kernel_source(omega, y, real)
        fits = bool(
            kernel(
                pointer(residues, "uint8_t[]"), residues.itemsize, pointer(y, real), y.size, b, code.bits,
                int(code.rounding), 2 * largest_integer(y.dtype), source, start, *words,
                pointer(integers, "int64_t[]"), pointer(values, real),
            )
        )  # fmt: skip
    if not fits:
        if not math.isfinite(max_magnitude(y)):
            raise NotFiniteError(f"the model holds values that are not finite; {LOWER_RATE}")
        raise ThetaTooSmall(f"θ = {payload.theta:g} is too small for the receiver's weights")


def _recover_numpy(
    code: ModuloCode,
    b: float,
    residues: CodeArray,
    y: FloatArray,
    omega: FloatArray | None,
    integers: IntegerArray | None,
    values: FloatArray | None,
) -> bool:
    real, levels = y.dtype.type, 1 << code.bits
    offset = code._offset(omega, y.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        turns = y / real(b)
        turns *= real(levels)
        if not np.all(np.abs(turns) <= real(2 * largest_integer(y.dtype))):
            return False
    turns -= residues
    if offset is not None:
        turns -= offset
    # The smallest m for which K + offset = r + L m + offset reaches L (y/B − ½).
    turns *= real(1.0 / levels)
    turns -= real(0.5)
    np.ceil(turns, out=turns)
    whole = turns.astype(np.int64) if integers is None else integers
    if integers is not None:
        np.copyto(integers, turns, casting="unsafe")
    whole *= levels
    whole += residues
    if values is not None:
        np.copyto(values, whole, casting="unsafe")
        if offset is not None:
            values += offset
        values *= real(b / levels)
    return True


def _require_like(out: FloatArray | None, x: FloatArray) -> None:
    """Raise ValueError unless `out` has the size and type of `x`; the kernels write without a check."""
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype):
        raise ValueError(f"out has to be {x.dtype}{list(x.shape)}, not {out.dtype}{list(out.shape)}")


def _part(omega: Omega, part: slice) -> Omega:
    """Return ω of a part of the layer; a stream is cut by the number of its first coordinate instead."""
    return omega[part] if isinstance(omega, np.ndarray) else omega


def _little_endian(integers: IntegerArray) -> memoryview:
    return (integers if sys.byteorder == "little" else integers.byteswap()).data
