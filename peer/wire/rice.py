"""Rice codes of sequences of small non-negative integers.

A sequence v₀ … v₍ₖ₋₁₎ with parameter r is two bit strings: first the lowest r bits of every integer (padded to a byte),
then ⌊v₀/2^r⌋ zeros and a one, ⌊v₁/2^r⌋ zeros and a one, … (padded to a byte). Keeping the two parts apart is what lets
both be read without a loop over the integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from peer import native
from peer.wire import bits
from peer.wire.errors import PaddingNotZero, TruncatedFrame
from peer.wire.reader import Reader


def size_in_bits(values: npt.NDArray[np.int64], parameter: int) -> int:
    """Return the number of bits that `encode` needs, padding left out."""
    if native.lib is not None:
        return int(native.lib.wire_rice_bits(pointer64(values), values.size, parameter))
    return values.size * (parameter + 1) + int((values >> parameter).sum())


def encode(values: npt.NDArray[np.int64], parameter: int) -> bytes:
    """Return the Rice code of `values: int64[k]`, none of them negative."""
    if values.size == 0:
        return b""
    if native.lib is not None:
        low_bits = values.size * parameter
        unary_bits = size_in_bits(values, parameter) - low_bits
        out = np.zeros((low_bits + 7) // 8 + (unary_bits + 7) // 8, np.uint8)
        native.lib.wire_rice_encode(pointer64(values), values.size, parameter, bits.pointer(out), out.size)
        return out.tobytes()
    # The ones of the unary part: the i-th comes after all quotients up to its own and i earlier ones.
    ones = np.cumsum((values >> parameter) + 1) - 1
    unary = np.zeros((int(ones[-1]) + 8) // 8, np.uint8)
    _set_bits(unary, ones)
    if parameter == 0:
        return unary.tobytes()
    low = values.view(np.uint64) & np.uint64((1 << parameter) - 1)
    return bits.pack(low, parameter).tobytes() + unary.tobytes()


def decode(reader: Reader, count: int, parameter: int, greatest_sum: int) -> npt.NDArray[np.int64]:
    """Return `int64[count]` from the reader.

    The quotients' sum is at most `greatest_sum >> parameter` for any honest sequence; a unary part that is longer
    raises `TruncatedFrame`, so nothing beyond count + greatest_sum bits is ever looked at.
    """
    if count == 0:
        return np.zeros(0, np.int64)
    if native.lib is not None:
        return _decode_native(reader, count, parameter, greatest_sum)
    low = reader.take(bits.packed_size(count, parameter))
    longest = (count + (greatest_sum >> parameter) + 7) // 8
    ahead = np.frombuffer(reader.data[reader.position : min(reader.end, reader.position + longest)], np.uint8)
    ones = np.flatnonzero(np.unpackbits(ahead, bitorder="little"))[:count]
    if ones.size < count:
        raise TruncatedFrame(f"a Rice code of {count} integers ends after {ones.size}")
    last = int(ones[-1])
    bits.check_padding(reader.take(last // 8 + 1), last + 1)
    values = np.diff(ones, prepend=-1) - 1
    if parameter:
        values <<= parameter
        values |= bits.unpack(low, count, parameter, np.uint64).view(np.int64)
    return values


def _decode_native(reader: Reader, count: int, parameter: int, greatest_sum: int) -> npt.NDArray[np.int64]:
    # What is missing is found before anything is allocated for it.
    if reader.left < bits.packed_size(count, parameter):
        raise TruncatedFrame(f"a Rice code of {count} integers ends within their low bits")
    values = np.empty(count, np.int64)
    ahead = reader.data[reader.position : reader.end]
    used = native.lib.wire_rice_decode(
        bits.pointer(ahead), len(ahead), count, parameter, greatest_sum, pointer64(values)
    )
    if used == -1:
        raise TruncatedFrame(f"a Rice code of {count} integers ends before the last")
    if used == -2:
        raise PaddingNotZero("the unused bits at the end of a Rice code are not zero")
    reader.take(used)
    return values


def pointer64(values: npt.NDArray[np.int64]) -> Any:
    """Return the address of contiguous int64 integers for a native kernel."""
    return native.ffi.from_buffer("int64_t[]", values)


def _set_bits(target: bits.ByteArray, positions: npt.NDArray[np.int64]) -> None:
    """Set the bits at ascending `positions` of a zeroed bit string."""
    byte = positions >> 3
    starts = np.flatnonzero(np.diff(byte, prepend=-1))
    mask = np.left_shift(1, positions & 7)
    target[byte[starts]] = np.add.reduceat(mask, starts)
