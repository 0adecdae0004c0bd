"""Bit strings: integers of a fixed or varying number of bits, back to back.

Bit i of a string is bit i mod 8 (counted from the least significant) of byte ⌊i/8⌋; an integer's least significant bit
comes first. The unused bits of the last byte are zero.

The native kernels and the numpy code return the same bytes. The numpy code works on pieces of `CHUNK` integers, so that
its 64-bit intermediates stay small compared with the message.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from peer import native
from peer.wire.errors import PaddingNotZero, TruncatedFrame

UnsignedArray: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
ByteArray: TypeAlias = npt.NDArray[np.uint8]
IntegerArray: TypeAlias = npt.NDArray[np.int64]

CHUNK = 1 << 14
"""A multiple of 8, so that pieces of integers of a fixed width begin on whole bytes."""

_ALL_ONES = np.uint64(2**64 - 1)


def packed_size(count: int, width: int) -> int:
    """Return the bytes that `count` integers of `width` bits take."""
    return (count * width + 7) // 8


def pack(values: UnsignedArray, width: int) -> ByteArray:
    """Return `values: uint[n]` (1, 2, 4 or 8 bytes each), every one below 2**width, as a bit string.

    If the width is that of the array's own type, the result shares its memory.
    """
    if width == 8 * values.itemsize:
        return as_bytes(values)
    out = np.empty(packed_size(values.size, width), np.uint8)
    if width == 0:
        return out
    if native.lib is not None:
        native.lib.wire_pack(pointer(values), values.itemsize, values.size, width, pointer(out))
        return out
    if width == 1:
        for start in range(0, values.size, CHUNK):
            part = np.packbits(values[start : start + CHUNK].astype(np.bool_), bitorder="little")
            out[start // 8 : start // 8 + part.size] = part
        return out
    for start in range(0, values.size, CHUNK):
        piece = values[start : start + CHUNK].astype(np.uint64)
        positions = np.arange(piece.size, dtype=np.int64) * width
        part = _scatter(piece, positions, np.full(piece.size, width), piece.size * width)
        at = start * width // 8
        out[at : at + part.size] = part[: out.size - at]
    return out


def unpack(data: memoryview, count: int, width: int, dtype: npt.DTypeLike) -> UnsignedArray:
    """Return `uint[count]` of a bit string of `packed_size(count, width)` bytes, as an array of `dtype`.

    Raises `PaddingNotZero` if the last byte holds more than the integers.
    """
    out: UnsignedArray = np.empty(count, dtype)
    if count == 0 or width == 0:
        out[:] = 0
        return out
    check_padding(data, count * width)
    if width == 8 * out.itemsize:
        as_bytes(out)[:] = np.frombuffer(data, np.uint8)
        return out
    if native.lib is not None:
        native.lib.wire_unpack(pointer(data), len(data), count, width, pointer(out), out.itemsize)
        return out
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        at = start * width // 8
        piece = data[at : at + packed_size(size, width)]
        positions = np.arange(size, dtype=np.int64) * width
        out[start : start + size] = _gather(piece, positions, np.full(size, width))
    return out


class Writer:
    """Builds a bit string of `num_bits` bits out of integers of varying widths."""

    def __init__(self, num_bits: int) -> None:
        self._num_bits = num_bits
        self._words = np.zeros(num_bits // 64 + 2, "<u8")
        self._written = 0

    def append(self, values: npt.NDArray[np.uint64], widths: ByteArray) -> None:
        """Append the lowest `widths: uint8[n]` bits of `values: uint64[n]`; n of a few thousand, as all is in numpy."""
        if values.size == 0:
            return
        width = widths.astype(np.int64)
        ends = np.cumsum(width) + self._written % 64
        part = _scatter(values, ends - width, width, int(ends[-1])).view("<u8")
        at = self._written // 64
        self._words[at : at + part.size] |= part
        self._written += int(ends[-1]) - self._written % 64

    def finish(self) -> ByteArray:
        """Return the string in whole bytes."""
        return self._words.view(np.uint8)[: (self._num_bits + 7) // 8]


class BitReader:
    """Reads integers of varying widths from a bit string that is known to be long enough."""

    def __init__(self, data: memoryview, start: int = 0) -> None:
        """Begin at bit `start`."""
        self._data = data
        self._read = start

    def next(self, widths: ByteArray) -> npt.NDArray[np.uint64]:
        """Return the next integers, of `widths: uint8[n]` bits: uint64[n]."""
        if widths.size == 0:
            return np.zeros(0, np.uint64)
        width = widths.astype(np.int64)
        ends = np.cumsum(width) + self._read % 8
        at = self._read // 8
        last = int(ends[-1])
        self._read += last - self._read % 8
        return _gather(self._data[at : at + (last + 7) // 8], ends - width, width)


def pointer(memory: npt.NDArray[Any] | memoryview) -> native.CData:
    """Return the address of a contiguous buffer for a native kernel, which must not outlive the buffer."""
    return native.pointer(memory, "uint8_t[]")


def as_bytes(values: npt.NDArray[Any]) -> ByteArray:
    """Return the little-endian memory of a contiguous array, shared where the machine is little-endian."""
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8)


def check_padding(data: memoryview, num_bits: int) -> None:
    """Raise `PaddingNotZero` unless the bits of the last byte beyond `num_bits` are zero."""
    if len(data) != (num_bits + 7) // 8:
        raise TruncatedFrame(f"a bit string of {num_bits} bits has {len(data)} bytes")
    if num_bits % 8 and data[-1] >> num_bits % 8:
        raise PaddingNotZero("the unused bits at the end of a bit string are not zero")


def _scatter(
    values: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    widths: npt.NDArray[np.int64],
    total: int,
) -> ByteArray:
    """Return a bit string, in whole 64-bit words where `total` is not their multiple, with each value at its position.

    Positions are those of values laid back to back, so at most one value reaches from one word into the next.
    """
    words = np.zeros((total + 63) // 64 + 1, "<u8")
    shift = (positions & 63).astype(np.uint64)
    word = positions >> 6
    values = values & _masks(widths)
    starts = np.flatnonzero(np.diff(word, prepend=-1))
    words[word[starts]] = np.bitwise_or.reduceat(values << shift, starts)
    crossing = np.flatnonzero((positions & 63) + widths > 64)
    words[word[crossing] + 1] |= values[crossing] >> (np.uint64(64) - shift[crossing])
    return words[:-1].view(np.uint8)


def _gather(
    data: memoryview, positions: npt.NDArray[np.int64], widths: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """Return the integers at `positions` of a bit string."""
    padded = np.zeros((len(data) + 7) // 8 * 8 + 16, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    words = padded.view("<u8").astype(np.uint64, copy=False)
    shift = (positions & 63).astype(np.uint64)
    word = positions >> 6
    # Two shifts, since a shift by 64 (where the position is a word's first bit) is undefined.
    above = (words[word + 1] << np.uint64(1)) << (np.uint64(63) - shift)
    result: npt.NDArray[np.uint64] = ((words[word] >> shift) | above) & _masks(widths)
    return result


def _masks(widths: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    masks = _ALL_ONES >> (64 - np.maximum(widths, 1)).astype(np.uint64)
    return np.where(widths == 0, np.uint64(0), masks)
