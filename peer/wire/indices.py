"""Which k of n coordinates: four codes for a set of indices, of which the cheapest is chosen for each layer.

`RICE`: gaps as Rice code; the parameter is the code's number, 0 to 28. `POOLED`: the gaps of a few indices, in just the
bits that n − k needs, at the end of the frame, where small layers share a bit string. `ENTROPY`: gaps
as an entropy-coded stream. `ALL`: nothing, as k = n. The gap of an index is the number of coordinates skipped since the
one before, so unsorted and repeated indices cannot be expressed.

A bitmap is the Rice code with parameter 0, cut behind its last one. Elias–Fano never wins: with the same parameter its
low part is as long as that of Rice, and its high part ends at ⌊index/2^r⌋, the sum of all gaps floored once, where
Rice's ends at the sum of the floored gaps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from peer.wire import bits, integers, rice
from peer.wire.errors import IndexCountOutOfRange, IndexOutOfRange
from peer.wire.integers import Codec, Memory, Part
from peer.wire.reader import Reader

MAX_RICE = 28
POOLED, ENTROPY, ALL = 29, 30, 31
MAX_POOLED = 8
"""Indices of a layer beyond which the writer does not pool them."""


def encode(indices: npt.NDArray[np.int64], size: int, memory: Memory) -> tuple[int, list[Part]]:
    """Return the number of the cheapest code and the bytes of `indices: int64[k]`, strictly ascending below `size`."""
    count = indices.size
    if count == size:
        return ALL, []
    if count == 0:
        return 0, []
    gaps = indices.copy()
    gaps[1:] -= indices[:-1] + 1
    width = (size - count).bit_length()
    if count * width <= 8:
        # No other code takes less than a byte.
        memory.pooled_gaps.append((gaps, size, width))
        return POOLED, []
    code, cost = _best_rice(gaps, size)
    if count <= MAX_POOLED and count * width < cost + -cost % 8:
        memory.pooled_gaps.append((gaps, size, width))
        return POOLED, []
    # Below this the table costs more than a better model can save.
    if count >= 48:
        plan = integers.plan_gaps(gaps.view(np.uint64), gap_width(size))
        if plan.bits_needed < cost:
            codec, parts = integers.encode(gaps.view(np.uint64), gap_width(size), plan, memory)
            if codec is Codec.ENTROPY:
                return ENTROPY, parts
    return code, [rice.encode(gaps, code)]


def decode(reader: Reader, code: int, count: int, size: int, memory: Memory) -> npt.NDArray[np.int64]:
    """Return `int64[count]`, strictly ascending below `size`. `count` is at most `size`."""
    if code == ALL:
        if count != size:
            raise IndexCountOutOfRange(f"a sparse layer claims all of {size} coordinates and gives {count}")
        return np.arange(size)
    if code == POOLED:
        gaps = np.empty(count, np.int64)
        memory.pooled_gaps.append((gaps, size, (size - count).bit_length()))
        return gaps
    if code == ENTROPY:
        width = gap_width(size)
        gaps = integers.decode(reader, Codec.ENTROPY, count, width, np.uint64, memory).view(np.int64)
    else:
        gaps = rice.decode(reader, count, code, size - count)
    return _accumulated(gaps, size)


def encode_pool(memory: Memory) -> list[Part]:
    """Return the bit string of all pooled gaps, in order."""
    if not memory.pooled_gaps:
        return []
    values, widths = _joined(memory)
    writer = bits.Writer(int(widths.sum(dtype=np.int64)))
    writer.append(values.view(np.uint64), widths)
    return [writer.finish().tobytes()]


def decode_pool(reader: Reader, memory: Memory) -> None:
    """Fill the arrays of indices that `decode` has promised to. Raises `IndexOutOfRange`."""
    if not memory.pooled_gaps:
        return
    num_bits = sum(gaps.size * width for gaps, _, width in memory.pooled_gaps)
    data = reader.take((num_bits + 7) // 8)
    bits.check_padding(data, num_bits)
    source = bits.BitReader(data)
    for gaps, size, width in memory.pooled_gaps:
        for start in range(0, gaps.size, bits.CHUNK):
            piece = gaps[start : start + bits.CHUNK]
            piece[:] = source.next(np.full(piece.size, width, np.uint8))
        _accumulated(gaps, size)


def _joined(memory: Memory) -> tuple[npt.NDArray[np.int64], bits.ByteArray]:
    values = np.concatenate([gaps for gaps, _, _ in memory.pooled_gaps])
    widths = [np.full(gaps.size, width, np.uint8) for gaps, _, width in memory.pooled_gaps]
    return values, np.concatenate(widths)


def gap_width(size: int) -> int:
    """Return the number of bits of a gap between indices below `size`."""
    return size.bit_length()


def _best_rice(gaps: npt.NDArray[np.int64], size: int) -> tuple[int, float]:
    """Return the best Rice parameter near the one for evenly scattered indices, and its bits."""
    # For geometric gaps the best parameter is about log2(ln 2 · mean).
    guess = max(int(0.69 * (size - gaps.size) / gaps.size), 1).bit_length() - 1
    candidates = range(max(guess - 1, 0), min(guess + 1, MAX_RICE) + 1)
    cost, best = min((rice.size_in_bits(gaps, r), r) for r in candidates)
    return best, float(cost)


def _accumulated(gaps: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """Turn gaps into the indices that they lead to, in place, and return them. Raises `IndexOutOfRange`."""
    if gaps.size and int(gaps.max()) >= size:
        raise IndexOutOfRange(f"a gap of {int(gaps.max())} leaves a layer of {size} numbers")
    # Gaps are below 2^33 and a piece has 2^20 of them, so a piece's sum stays in an int64.
    last = -1
    for start in range(0, gaps.size, 1 << 20):
        piece = gaps[start : start + (1 << 20)]
        piece += 1
        piece[0] += last
        np.cumsum(piece, out=piece)
        last = int(piece[-1])
        if last >= size:
            raise IndexOutOfRange(f"an index of {last} leaves a layer of {size} numbers")
    return gaps


def name(code: int) -> str:
    """Return the code's name for reports."""
    return {POOLED: "pooled", ENTROPY: "entropy", ALL: "all"}.get(code, f"rice-{code}")
