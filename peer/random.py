"""Random numbers that depend on nothing but their names: Philox 4×32-10 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC'11).

No generator has a state here, so nothing depends on the order of calls and nothing has to be saved: the same run seed,
peer, purpose, round, layer and position give the same number on every machine, for ever. Dithered modulo codes are
decoded with numbers that the receiver draws anew, hence all of this is part of the wire format:

    key      the 8 bytes of BLAKE2b with a digest length of 8 and no key, over 32 bytes: the 15 bytes
             "sottovoce draws", the byte 1, the run seed as uint64, the peer as uint32 (2³² − 1 where all peers
             share the numbers) and the purpose as uint32, all little-endian; key word 0 is bytes 0 to 3 of the
             digest as little-endian uint32, key word 1 bytes 4 to 7
    counter  (block, layer, round, 0), four uint32
    word i   of a stream is output word i mod 4 of block i div 4
    float32  uniform i is (word i >> 8) · 2⁻²⁴
    float64  uniform i is ((word 2i >> 5) · 2²⁶ + (word 2i+1 >> 6)) · 2⁻⁵³

`integers`, `permutation` and `normals` are defined in their docstrings, on words as well and with exactly rounded
arithmetic only, so that every device deals the same batches and the same splits.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from peer.native import lib, pointer

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
UInt32Array: TypeAlias = npt.NDArray[np.uint32]

SHARED = None
"""In place of a peer: numbers that every peer of the run draws alike."""

_SHARED_PEER = 2**32 - 1
_MAX_WORDS = 2**34


class Purpose(enum.IntEnum):
    """Purpose for which numbers are drawn. Two purposes never share a number; the values are part of the wire
    format."""

    ROUNDING = 0
    """Stochastic rounding of a peer's own payloads."""
    SELECTION = 1
    """Coordinates that random-k sends."""
    DITHER = 2
    """ω of the modulo code, shared by all peers."""
    BATCH = 3
    AUGMENT = 4
    INIT = 5
    PARTITION = 6
    BACKOFF = 7
    PAIRING = 8
    """Partners in a pairwise algorithm."""
    GRAPH = 9
    """Random graphs."""
    HOLD_OUT = 11
    SIMULATION = 12
    """Delays and losses of a simulated network."""
    STATISTICS = 13
    """Samples from which the averaged model gets the statistics of its norms."""
    COPY = 14
    """Stochastic rounding of the copies of a peer's model, the same at all that keep one."""
    MEMORY = 15
    """Stochastic rounding of a peer's error memory."""


@dataclass(frozen=True, slots=True)
class Stream:
    """An endless sequence of random words, named by its key and by two counter words; it holds no position."""

    key: int
    layer: int
    round: int

    def words(self, size: int, start: int = 0) -> UInt32Array:
        """Return words `start` to `start + size − 1` as uint32[size]."""
        result: UInt32Array = _room(size, np.dtype(np.uint32), start + size)
        if lib is not None:
            lib.philox_words(pointer(result, "uint32_t[]"), size, start, *self.counter)
        else:
            _words_numpy(result, start, self)
        return result

    def uniforms(self, size: int, dtype: npt.DTypeLike = np.float32, start: int = 0) -> FloatArray:
        """Return uniforms `start` to `start + size − 1` in [0, 1) as float32[size] or float64[size]."""
        kind: np.dtype[Any] = np.dtype(dtype)
        result: FloatArray
        if kind == np.float32:
            result = _room(size, kind, start + size)
            if lib is not None:
                lib.philox_uniforms_f32(pointer(result, "float[]"), size, start, *self.counter)
            else:
                words = self.words(size, start)
                words >>= np.uint32(8)
                np.multiply(words, np.float32(2.0**-24), out=result, casting="unsafe", dtype=np.float32)
            return result
        if kind == np.float64:
            result = _room(size, kind, 2 * (start + size))
            if lib is not None:
                lib.philox_uniforms_f64(pointer(result, "double[]"), size, start, *self.counter)
            else:
                words = self.words(2 * size, 2 * start)
                np.multiply(words[0::2] >> np.uint32(5), 2.0**26, out=result)
                result += words[1::2] >> np.uint32(6)
                result *= 2.0**-53
            return result
        raise ValueError(f"uniforms are float32 or float64, not {kind}")

    def integers(self, size: int, bound: int) -> npt.NDArray[np.int64]:
        """Return `size` integers in [0, bound), int64[size]; `bound` at most 2³².

        Integer i is ⌊bound · w / 2⁶⁴⌋ of the 64 bits w = word 2i · 2³² + word 2i+1: unlike rejection this needs a fixed
        number of words; no integer is more than 2⁻³² likelier than another.
        """
        if not 1 <= bound <= 2**32:
            raise ValueError(f"the bound of random integers lies between 1 and 2**32, not {bound}")
        words = self.words(2 * size).astype(np.uint64)
        factor = np.uint64(bound)
        # bound · high cannot overflow: both are at most 2³², and high is below it.
        result = (words[0::2] * factor + ((words[1::2] * factor) >> np.uint64(32))) >> np.uint64(32)
        return result.astype(np.int64)

    def permutation(self, size: int) -> npt.NDArray[np.int64]:
        """Return 0 … size−1 in random order, int64[size]: the order that sorts the 64-bit numbers w of `integers`
        ascending, equal ones by position."""
        words = self.words(2 * size).astype(np.uint64)
        return np.argsort((words[0::2] << np.uint64(32)) | words[1::2], kind="stable").astype(np.int64)

    def normals(self, size: int) -> npt.NDArray[np.float64]:
        """Return `size` standard normal numbers, float64[size].

        Number i is the inverse distribution function (Wichura's AS 241, PPND16) of (m + ½) · 2⁻⁵², m the 52 bits
        word 2i · 2²⁰ + (word 2i+1 >> 12). Its logarithm is computed here too, since those of the C library and of
        numpy differ among processors in their last bit.
        """
        words = self.words(2 * size).astype(np.uint64)
        return normals_of((words[0::2] << np.uint64(20)) | (words[1::2] >> np.uint64(12)))

    @property
    def counter(self) -> tuple[int, int, int, int]:
        """Key word 0, key word 1, layer and round, as the native kernels take them."""
        return self.key & 0xFFFFFFFF, self.key >> 32, self.layer, self.round


def stream(seed: int, peer: int | None, purpose: Purpose, round: int = 0, layer: int = 0) -> Stream:
    """Return the stream of these names. `peer` None means shared by all peers."""
    if not (0 <= round < 2**32 and 0 <= layer < 2**32):
        raise ValueError(f"round and layer lie between 0 and 2**32 - 1, not {round} and {layer}")
    return Stream(derive_key(seed, peer, int(purpose)), layer, round)


@lru_cache(maxsize=4096)
def derive_key(seed: int, peer: int | None, purpose: int) -> int:
    """Return the 64-bit Philox key, key word 0 in the low half (see the module docstring)."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"a run seed lies between 0 and 2**64 - 1, not {seed}")
    number = _SHARED_PEER if peer is None else peer
    if peer is not None and not 0 <= peer < _SHARED_PEER:
        raise ValueError(f"a peer's number lies between 0 and 2**32 - 2, not {peer}")
    packed = struct.pack("<15sBQII", b"sottovoce draws", 1, seed, number, purpose)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class PeerDraws:
    """The random numbers of one peer in one round: `peer.compress.base.Draws`."""

    seed: int
    peer: int
    round: int

    def own(self, layer: int, size: int, dtype: npt.DTypeLike) -> FloatArray:
        """Return `size` uniforms in [0, 1) that only this peer draws."""
        return self.own_stream(layer).uniforms(size, dtype)

    def shared(self, layer: int, size: int, dtype: npt.DTypeLike) -> FloatArray:
        """Return `size` uniforms in [0, 1) that every peer of the run draws alike in this round."""
        return self.shared_stream(layer).uniforms(size, dtype)

    def words(self, layer: int, size: int) -> UInt32Array:
        """Return `size` random words of this peer, independent of `own`."""
        return stream(self.seed, self.peer, Purpose.SELECTION, self.round, layer).words(size)

    def own_stream(self, layer: int) -> Stream:
        """Return the stream of `own`: a native kernel draws from it where it needs the numbers, without an array."""
        return stream(self.seed, self.peer, Purpose.ROUNDING, self.round, layer)

    def shared_stream(self, layer: int) -> Stream:
        """Return the stream of `shared`."""
        return stream(self.seed, SHARED, Purpose.DITHER, self.round, layer)


@dataclass(frozen=True, slots=True)
class PhiloxSource:
    """Gives one peer its random numbers of each round: `peer.gossip.base.DrawSource`."""

    seed: int
    peer: int

    def draws(self, t: int) -> PeerDraws:
        return PeerDraws(self.seed, self.peer, t)


_M0, _M1, _W0, _W1, _LOW = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF


def _room(size: int, kind: np.dtype[Any], last_word: int) -> Any:
    if last_word > _MAX_WORDS:
        raise ValueError(f"a stream holds 2**34 words, {last_word} were asked for")
    return np.empty(size, kind)


_CHUNK_BLOCKS = 8192
"""Few enough to keep the eight temporaries of a numpy round in the second-level cache."""


def _words_numpy(out: UInt32Array, start: int, source: Stream) -> None:
    """Fill `out` with the words from `start` on, by numpy alone."""
    key0, key1, layer, round_ = source.counter
    low, half = np.uint64(_LOW), np.uint64(32)
    position = 0
    while position < out.size:
        word = start + position
        first, skip = divmod(word, 4)
        count = min(_CHUNK_BLOCKS, (skip + out.size - position + 3) // 4)
        c0 = np.arange(first, first + count, dtype=np.uint64)
        c1 = np.full(count, layer, np.uint64)
        c2 = np.full(count, round_, np.uint64)
        c3 = np.zeros(count, np.uint64)
        k0, k1 = key0, key1
        for _ in range(10):
            p0 = c0 * np.uint64(_M0)
            p1 = c2 * np.uint64(_M1)
            c0 = (p1 >> half) ^ c1 ^ np.uint64(k0)
            c2 = (p0 >> half) ^ c3 ^ np.uint64(k1)
            c1, c3 = p1 & low, p0 & low
            k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
        block = np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32).reshape(-1)[skip:]
        taken = min(block.size, out.size - position)
        out[position : position + taken] = block[:taken]
        position += taken


# Wichura, "Algorithm AS 241: The percentage points of the normal distribution", 1988: numerators and denominators of
# the central region, of the tails up to r = 5 and of those beyond, highest power first.
_CENTRE = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)  # fmt: skip
_TAIL = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
     3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0),
)  # fmt: skip
_FAR_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)  # fmt: skip


def normals_of(m: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return a standard normal number for each of `m: uint64[n]`, random integers below 2⁵², as `Stream.normals`."""
    return _inverse_normal((m.astype(np.float64) + 0.5) * 2.0**-52)


def _inverse_normal(p: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the standard normal quantile of every p in (0, 1), in exactly rounded operations only."""
    q = p - 0.5
    result = q * _ratio(0.180625 - q * q, _CENTRE)
    tails = np.flatnonzero(np.abs(q) > 0.425)
    r = np.sqrt(-_logarithm(np.minimum(p[tails], 1.0 - p[tails])))
    size = np.where(r <= 5.0, _ratio(r - 1.6, _TAIL), _ratio(r - 5.0, _FAR_TAIL))
    result[tails] = np.where(q[tails] < 0.0, -size, size)
    return result


def _ratio(
    x: npt.NDArray[np.float64], coefficients: tuple[tuple[float, ...], tuple[float, ...]]
) -> npt.NDArray[np.float64]:
    above, below = (np.zeros_like(x) for _ in range(2))
    for a, b in zip(*coefficients, strict=True):
        above = above * x + a
        below = below * x + b
    return above / below


def _logarithm(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the natural logarithm of positive numbers to about 1 unit in the last place."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.7071067811865476
    mantissa = np.where(small, 2.0 * mantissa, mantissa)
    exponent = exponent - small
    # ln m = 2 artanh z with |z| ≤ 0.1716: the terms beyond z²¹ are below 2⁻⁵³ of the first.
    z = (mantissa - 1.0) / (mantissa + 1.0)
    square, series = z * z, np.zeros_like(z)
    for power in range(21, 0, -2):
        series = series * square + 1.0 / power
    return exponent * 0.6931471805599453 + 2.0 * z * series
