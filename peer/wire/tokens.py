"""Integers as a token (entropy-coded) and some raw bits: what lets one coder serve levels, gaps and floats alike.

A `TokenMap` splits an integer v of w bits. With d = (v − centre) mod 2^w, z is d itself or, where the map folds,
zigzag of d read as a signed number (0, −1, 1, −2, … become 0, 1, 2, 3, …). With h = ⌊z/2^r⌋ and e the map's number of
direct bits: if h < 2^e the token is h and the lowest r bits of z are raw; otherwise, with L = ⌊log₂ h⌋, the token is
2^e + 4 (L − e) + (⌊h/2^(L−2)⌋ mod 4) and the lowest r + L − 2 bits of z are raw. So tokens beyond the direct ones cut
every octave into four.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from peer.wire import bits
from peer.wire.bits import CHUNK, ByteArray, UnsignedArray

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
        """How many tokens there are at most (integers whose token would be 256 or more do not fit the map)."""
        high = self.width - self.raw_bits
        most = 1 << high if high <= self.direct else (1 << self.direct) + 4 * (high - self.direct)
        return min(most, 256)

    @cached_property
    def bases(self) -> npt.NDArray[np.uint64]:
        """The smallest z of each token: uint64[max_tokens]."""
        tokens = np.arange(self.max_tokens)
        beyond = np.maximum(tokens - (1 << self.direct), 0)
        high = np.where(tokens >> self.direct, (4 + beyond % 4) << (beyond // 4 + self.direct - 2), tokens)
        return high.astype(np.uint64) << np.uint64(self.raw_bits)

    @cached_property
    def raw_widths(self) -> ByteArray:
        """The number of raw bits of each token: uint8[max_tokens]."""
        tokens = np.arange(self.max_tokens)
        beyond = np.maximum(tokens - (1 << self.direct), 0)
        more = np.where(tokens >> self.direct, beyond // 4 + self.direct - 2, 0)
        return (more + self.raw_bits).astype(np.uint8)

    @property
    def has_raw_bits(self) -> bool:
        """Whether any integer has raw bits."""
        return self.width > self.direct or self.raw_bits > 0

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
        for start in range(0, values.size, CHUNK):
            out[start : start + CHUNK] = self._tokens_of(self._folded(values[start : start + CHUNK]))
        return out

    def _tokens_of(self, z: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        return np.searchsorted(self.bases, z, side="right") - 1

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
        reader = bits.BitReader(raw)
        for start in range(0, tokens.size, CHUNK):
            part = slice(start, start + CHUNK)
            z = self.bases[tokens[part]]
            if self.has_raw_bits:
                z |= reader.next(self.raw_widths[tokens[part]])
            out[part] = self._unfolded(z)
        return out


def counts(tokens: ByteArray) -> npt.NDArray[np.int64]:
    """Return how often each token occurs: int64[256]."""
    total = np.zeros(256, np.int64)
    for start in range(0, tokens.size, CHUNK):
        total += np.bincount(tokens[start : start + CHUNK], minlength=256)
    return total
