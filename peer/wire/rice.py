"""Rice codes of sequences of small non-negative integers.

A sequence v₀ … v₍ₖ₋₁₎ with parameter r is one bit string: first ⌊v₀/2^r⌋ zeros and a one, ⌊v₁/2^r⌋ zeros and a one, …,
then the lowest r bits of every integer. Because the two parts are separate, both can be read without a loop over the
integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from peer import native
from peer.wire import bits
from peer.wire.errors import PaddingNotZero, TruncatedFrame
from peer.wire.reader import Reader

if TYPE_CHECKING:
    from peer.native._kernels import Kernels


def size_in_bits(values: npt.NDArray[np.int64], parameter: int) -> int:
    """Return the number of bits that `encode` needs, padding left out."""
    if native.lib is not None:
        return native.lib.wire_rice_bits(pointer64(values), values.size, parameter)
    return values.size * (parameter + 1) + int((values >> parameter).sum())


def sizes_in_bits(
    values: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    parameters: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Return `size_in_bits` of several sequences within `values`, each with its own parameter and none of them empty:
    int64[sequences]."""
    result = np.empty(starts.size, np.int64)
    for number, (start, count, r) in enumerate(zip(starts.tolist(), counts.tolist(), parameters.tolist(), strict=True)):
        result[number] = size_in_bits(values[start : start + count], r)
    return result


def encode(values: npt.NDArray[np.int64], parameter: int) -> bytes:
    """Return the Rice code of `values: int64[k]`, none of them negative."""
    if values.size == 0:
        return b""
    num_bits = size_in_bits(values, parameter)
    if native.lib is not None:
        out = np.zeros((num_bits + 7) // 8, np.uint8)
        native.lib.wire_rice_encode(pointer64(values), values.size, parameter, bits.pointer(out), out.size)
        return out.tobytes()
    writer = bits.Writer(num_bits)
    for start in range(0, values.size, bits.CHUNK):
        # A long run of zeros takes several pieces of up to 32 bits, the last of which ends with the one.
        quotients = values[start : start + bits.CHUNK] >> parameter
        pieces = quotients // 32 + 1
        widths = np.full(int(pieces.sum()), 32, np.uint8)
        last = np.cumsum(pieces) - 1
        widths[last] = quotients % 32 + 1
        ones = np.zeros(widths.size, np.uint64)
        ones[last] = np.uint64(1) << (quotients % 32).astype(np.uint64)
        writer.append(ones, widths)
    for start in range(0, values.size, bits.CHUNK):
        low = values[start : start + bits.CHUNK].view(np.uint64)
        writer.append(low, np.full(low.size, parameter, np.uint8))
    return writer.finish().tobytes()


def decode(reader: Reader, count: int, parameter: int, greatest_sum: int) -> npt.NDArray[np.int64]:
    """Return `int64[count]` from the reader.

    The quotients' sum is at most `greatest_sum >> parameter` for any honest sequence; a longer unary part raises
    `TruncatedFrame`, so no bit beyond count + greatest_sum is ever looked at.
    """
    if count == 0:
        return np.zeros(0, np.int64)
    # Missing bytes are found before anything is allocated for them.
    if reader.left < bits.packed_size(count, parameter + 1):
        raise TruncatedFrame(f"a Rice code of {count} integers is longer than the rest of the frame")
    if native.lib is not None:
        return _decode_native(native.lib, reader, count, parameter, greatest_sum)
    longest = (count + (greatest_sum >> parameter) + 7) // 8
    ahead = np.frombuffer(reader.data[reader.position : min(reader.end, reader.position + longest)], np.uint8)
    ones = np.unpackbits(ahead, bitorder="little").nonzero()[0][:count]
    if ones.size < count:
        raise TruncatedFrame(f"a Rice code of {count} integers ends after {ones.size}")
    unary_bits = int(ones[-1]) + 1
    num_bits = unary_bits + count * parameter
    data = reader.take((num_bits + 7) // 8)
    bits.check_padding(data, num_bits)
    values = np.diff(ones, prepend=-1) - 1
    if parameter:
        low = bits.BitReader(data, unary_bits)
        for start in range(0, count, bits.CHUNK):
            piece = values[start : start + bits.CHUNK]
            piece <<= parameter
            piece |= low.next(np.full(piece.size, parameter, np.uint8)).view(np.int64)
    return values


def _decode_native(
    kernels: Kernels, reader: Reader, count: int, parameter: int, greatest_sum: int
) -> npt.NDArray[np.int64]:
    values = np.empty(count, np.int64)
    ahead = reader.data[reader.position : reader.end]
    used = kernels.wire_rice_decode(bits.pointer(ahead), len(ahead), count, parameter, greatest_sum, pointer64(values))
    reader.take(checked(used, count))
    return values


def checked(used: int, count: int) -> int:
    """Return the number of bytes that a kernel has read for `count` integers, or raise the error for which its answer
    stands."""
    if used == -1:
        raise TruncatedFrame(f"a Rice code of {count} integers ends before the last")
    if used == -2:
        raise PaddingNotZero("the unused bits at the end of a Rice code are not zero")
    return used


def pointer64(values: npt.NDArray[np.int64]) -> native.CData:
    """Return the address of contiguous int64 integers for a native kernel."""
    return native.pointer(values, "int64_t[]")
