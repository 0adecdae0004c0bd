"""Integers as a token (entropy-coded) and some raw bits, so that one coder serves levels, gaps and floats alike.

A `TokenMap` splits an integer v of w bits. With d = (v − centre) mod 2^w, z is d itself or, where the map folds, zigzag
of d read as a signed number (0, −1, 1, −2, … become 0, 1, 2, 3, …). With h = ⌊z/2^r⌋ and e the map's number of direct
bits: if h < 2^e the token is h and the lowest r bits of z are raw; otherwise, with L = ⌊log₂ h⌋, the token is 2^e + 4
(L − e) + (⌊h/2^(L−2)⌋ mod 4) and the lowest r + L − 2 bits of z are raw. Tokens beyond the direct ones thus cut every
octave into four.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from peer import native
from peer.wire import bits
from peer.wire.bits import CHUNK, ByteArray, UnsignedArray, pointer

MIN_DIRECT = 2
MAX_DIRECT = 8


@dataclass(frozen=True)
class TokenMap:
    """One way to split integers of `width` bits (see the module's docstring)."""

    width: int
    """1 to 64."""
    centre: int = 0
    folds: bool = False
    raw_bits: int = 0
    """r, below the width."""
    direct: int = MAX_DIRECT
    """e, 2 to 8."""

    @cached_property
    def max_tokens(self) -> int:
        """Greatest number of tokens (integers whose token would be 256 or more do not fit the map)."""
        high = self.width - self.raw_bits
        most = 1 << high if high <= self.direct else (1 << self.direct) + 4 * (high - self.direct)
        return min(most, 256)

    @property
    def bases(self) -> npt.NDArray[np.uint64]:
        """The smallest z of each token: uint64[256], zero from `max_tokens` on."""
        return _tables(self.max_tokens, self.raw_bits, self.direct)[0]

    @property
    def raw_widths(self) -> ByteArray:
        """The number of raw bits of each token: uint8[256], r from `max_tokens` on."""
        return _tables(self.max_tokens, self.raw_bits, self.direct)[1]

    @property
    def has_raw_bits(self) -> bool:
        """Whether any integer has raw bits."""
        return self.width > self.direct or self.raw_bits > 0

    @property
    def order_of_codes(self) -> npt.NDArray[np.int64]:
        """The code of each token, if every code of up to eight bits is a token: int64[2**width]."""
        return _order_of_codes(self.width, self.centre, self.folds)

    @property
    def _rule(self) -> tuple[int, int, bool]:
        return self.width, self.centre, self.folds

    def _folded(self, values: UnsignedArray) -> npt.NDArray[np.uint64]:
        mask = np.uint64(2**self.width - 1)
        d = (values.astype(np.uint64) - np.uint64(self.centre)) & mask
        if self.folds:
            negative = (d >> np.uint64(self.width - 1)).astype(np.bool_)
            d = np.where(negative, ~(d << np.uint64(1)), d << np.uint64(1)) & mask
        return d

    def _unfolded(self, z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        mask = np.uint64(2**self.width - 1)
        if self.folds:
            half = z >> np.uint64(1)
            z = np.where((z & np.uint64(1)).astype(np.bool_), ~half, half)
        return (z + np.uint64(self.centre)) & mask

    def tokens(self, values: UnsignedArray) -> ByteArray:
        """Return the tokens of `values: uint[n]`: uint8[n]."""
        out = np.empty(values.size, np.uint8)
        if native.lib is not None:
            native.lib.wire_tokens(
                pointer(values), values.itemsize, values.size, *self._rule, self.raw_bits, self.direct, pointer(out)
            )
            return out
        for start in range(0, values.size, CHUNK):
            out[start : start + CHUNK] = self._tokens_of(self._folded(values[start : start + CHUNK]))
        return out

    def _tokens_of(self, z: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        tokens: npt.NDArray[np.int64] = np.searchsorted(self.bases[: self.max_tokens], z, side="right") - 1
        return tokens

    def raw(self, values: UnsignedArray, tokens: ByteArray, num_bits: int) -> ByteArray:
        """Return the raw bits of `values`, whose tokens are given, as a bit string of `num_bits` bits in all."""
        writer = bits.Writer(num_bits)
        for start in range(0, values.size, CHUNK):
            part = slice(start, start + CHUNK)
            writer.append(self._folded(values[part]), self.raw_widths[tokens[part]])
        return writer.finish()

    def values(self, tokens: ByteArray, raw: memoryview, dtype: npt.DTypeLike) -> UnsignedArray:
        """Return the integers, as `dtype`, of tokens below `max_tokens` and the bit string of their raw bits."""
        out: UnsignedArray = np.empty(tokens.size, dtype)
        if native.lib is not None:
            native.lib.wire_values(
                pointer(tokens),
                tokens.size,
                pointer(raw),
                len(raw),
                native.ffi.cast("uint64_t *", pointer(self.bases)),
                pointer(self.raw_widths),
                *self._rule,
                pointer(out),
                out.itemsize,
            )
            return out
        reader = bits.BitReader(raw)
        for start in range(0, tokens.size, CHUNK):
            part = slice(start, start + CHUNK)
            z = self.bases[tokens[part]]
            if self.has_raw_bits:
                z |= reader.next(self.raw_widths[tokens[part]])
            out[part] = self._unfolded(z)
        return out


@lru_cache(maxsize=256)
def _order_of_codes(width: int, centre: int, folds: bool) -> npt.NDArray[np.int64]:
    tokens = TokenMap(width, centre, folds).tokens(np.arange(1 << width, dtype=np.uint8))
    return np.argsort(tokens)


@lru_cache(maxsize=256)
def _tables(num_tokens: int, raw_bits: int, direct: int) -> tuple[npt.NDArray[np.uint64], ByteArray]:
    """Return the base and the number of raw bits of every token."""
    tokens = np.arange(num_tokens)
    beyond = np.maximum(tokens - (1 << direct), 0)
    octave = beyond // 4 + direct
    is_direct = tokens < 1 << direct
    high = np.where(is_direct, tokens, (4 + beyond % 4) << np.maximum(octave - 2, 0))
    bases = np.zeros(256, np.uint64)
    bases[:num_tokens] = high.astype(np.uint64) << np.uint64(raw_bits)
    raw_widths = np.full(256, raw_bits, np.uint8)
    raw_widths[:num_tokens] = np.where(is_direct, 0, octave - 2) + raw_bits
    return bases, raw_widths


def counts(tokens: ByteArray) -> npt.NDArray[np.int64]:
    """Return the occurrences of each token: int64[256]."""
    only: npt.NDArray[np.int64] = counts_of_spans(tokens, np.array([tokens.size], np.int64))[0]
    return only


def counts_of_spans(tokens: ByteArray, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the occurrences of each token in each of the consecutive spans: int64[spans, 256]."""
    if native.lib is not None:
        result = np.empty((sizes.size, 256), np.int64)
        pointers = native.ffi.cast("int64_t *", pointer(sizes)), native.ffi.cast("int64_t *", pointer(result))
        native.lib.wire_counts(pointer(tokens), pointers[0], sizes.size, pointers[1])
        return result
    result = np.zeros((sizes.size, 256), np.int64)
    begin = 0
    for number, size in enumerate(sizes.tolist()):
        for start in range(begin, begin + size, CHUNK):
            result[number] += np.bincount(tokens[start : min(start + CHUNK, begin + size)], minlength=256)
        begin += size
    return result


def counts_of_groups(tokens: ByteArray, sizes: npt.NDArray[np.int64], groups: ByteArray) -> npt.NDArray[np.int64]:
    """Return the occurrences of each token in each group of consecutive spans: int64[groups, 256]."""
    of_spans = counts_of_spans(tokens, sizes)
    return np.stack([of_spans[groups == group].sum(axis=0) for group in range(int(groups.max()) + 1)])
