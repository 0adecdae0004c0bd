"""Choice of k of n coordinates: four codes for a set of indices, of which the cheapest is chosen for each layer.

`RICE`: gaps as Rice code; the parameter is the code's number, 0 to 28. `FIXED`: the gaps of a few indices, in just the
bits that n − k needs, in a bit string that all layers share. `ENTROPY`: gaps as a span of an entropy-coded stream that
all layers share. `ALL`: nothing, as k = n. The gap of an index is the number of coordinates skipped since the one
before, so unsorted and repeated indices cannot be expressed.

A bitmap is the Rice code with parameter 0, cut after its last one. Elias–Fano never wins: with the same parameter its
low part is as long as that of Rice, and its high part ends at ⌊index/2^r⌋, the sum of all gaps floored once, where
Rice's ends at the sum of the floored gaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peer import native
from peer.errors import LocalProtocolError
from peer.wire import bits, integers, rice
from peer.wire.bits import IntegerArray
from peer.wire.errors import IndexCountOutOfRange, IndexOutOfRange
from peer.wire.grouping import logarithms
from peer.wire.integers import Part
from peer.wire.plans import Codec, plan_gaps
from peer.wire.reader import Reader

MAX_RICE = 28
FIXED, ENTROPY, ALL = 29, 30, 31
MAX_FIXED = 8
"""Indices of a layer beyond which the writer does not use the fixed code."""
WORTH_MODELLING = 48
"""Indices of all layers below which a table costs more than it can save."""
_NOT_ASCENDING = "sparse indices must be strictly ascending and within their layer"


@dataclass(frozen=True)
class Coded:
    """Coded form of some sets of indices."""

    codes: npt.NDArray[np.uint8]
    """The code of each set: uint8[sets]."""
    gaps: IntegerArray
    """Gaps of all sets, one after another. Sets with a Rice code have theirs in their sections."""
    behind: list[Part]
    """Parts that follow all sections."""

    def in_sections(self, counts: IntegerArray) -> Iterator[tuple[int, bytes]]:
        """Yield for each set its code and the bytes for its section."""
        start = 0
        for code, count in zip(self.codes.tolist(), counts.tolist(), strict=True):
            yield code, rice.encode(self.gaps[start : start + count], code) if code <= MAX_RICE else b""
            start += count


def encode(where: IntegerArray, counts: IntegerArray, sizes: IntegerArray, packed: bool = False) -> Coded:
    """Return the coded form of sets of indices, which follow one another in `where`.

    `counts` and `sizes`, int64[sets]: k of each set and n of its layer. Raises `LocalProtocolError` unless the indices
    of each ascend strictly below n. `packed`: without the entropy code.
    """
    gaps, codes = np.empty(where.size, np.int64), np.zeros(counts.size, np.uint8)
    if native.lib is not None:
        out = np.empty(9 * where.size, np.uint8)
        written = native.lib.wire_write_indices(
            rice.pointer64(where), rice.pointer64(counts), rice.pointer64(sizes), counts.size, packed, logarithms(),
            rice.pointer64(gaps), bits.pointer(codes), bits.pointer(out),
        )  # fmt: skip
        if written == -1:
            raise LocalProtocolError(_NOT_ASCENDING)
        if written < 0:
            raise MemoryError(f"no memory to code {where.size} indices")
        return Coded(codes, gaps, [out[:written].data] if written else [])
    rice_bytes = _choose_codes(gaps, codes, where, counts, sizes)
    parts: list[Part] = []
    own = (codes <= MAX_RICE) & (counts > 0)
    if not packed and own.any() and int(counts[own].sum()) >= WORTH_MODELLING:
        spans = counts[own]
        plain = gaps if own.all() else gaps[np.repeat(own, counts)]
        plan = plan_gaps(plain.view(np.uint64), gap_width(int(sizes[own].max())), spans)
        if plan.bits_needed < 8 * rice_bytes:
            codec, stream = integers.encode(plain.view(np.uint64), gap_width(int(sizes[own].max())), plan, spans)
            if codec is Codec.ENTROPY:
                codes[own] = ENTROPY
                parts = stream
    if FIXED in codes:
        parts = [_fixed(gaps, counts, sizes, codes), *parts]
    return Coded(codes, gaps, parts)


def _choose_codes(
    gaps: IntegerArray, codes: npt.NDArray[np.uint8], where: IntegerArray, counts: IntegerArray, sizes: IntegerArray
) -> int:
    """Write the gaps of all sets and the best code of each, chosen without regard to the others; return the bytes of
    those in Rice codes."""
    _write_gaps(gaps, where, counts, sizes)
    codes[counts == sizes] = ALL
    own = np.flatnonzero((codes != ALL) & (counts > 0))
    if not own.size:
        return 0
    starts = np.cumsum(counts) - counts
    codes[own], needed = _best_rice(gaps, starts[own], counts[own], sizes[own])
    in_bytes = (needed + 7) // 8
    fixed = counts[own] * _bit_lengths(sizes[own] - counts[own])
    # A Rice code takes at least a byte of its own, so up to 8 bits among those of other layers are never more.
    few = (fixed <= 8) | (counts[own] <= MAX_FIXED) & (fixed < 8 * in_bytes)
    codes[own[few]] = FIXED
    return int(in_bytes[~few].sum())


def _fixed(gaps: IntegerArray, counts: IntegerArray, sizes: IntegerArray, codes: npt.NDArray[np.uint8]) -> bytes:
    """Return the bit string of the gaps of all sets in the fixed code."""
    each = np.where(codes == FIXED, _bit_lengths(sizes - counts), 0)
    num_bits = int((counts * each).sum())
    writer = bits.Writer(num_bits)
    widths = np.repeat(each.astype(np.uint8), counts)
    for start in range(0, gaps.size, bits.CHUNK):
        part = slice(start, start + bits.CHUNK)
        writer.append(gaps[part].view(np.uint64), widths[part])
    return writer.finish().tobytes()


Reading = dict[int, list[tuple[int, int]]]
"""Code → (k, n) of each set of indices in it whose gaps follow the last section, in the order of the sections."""


def decode(reader: Reader, code: int, count: int, size: int, reading: Reading) -> IntegerArray | tuple[int, int]:
    """Return `int64[count]`, strictly ascending below `size`; or its place in the result of `decode_rest`: the code,
    and the number among those of that code. `count` is at most `size`."""
    if code == ALL:
        if count != size:
            raise IndexCountOutOfRange(f"a sparse layer claims all of {size} coordinates and gives {count}")
        return np.arange(size)
    if code in (FIXED, ENTROPY):
        sets = reading.setdefault(code, [])
        sets.append((count, size))
        return code, len(sets) - 1
    gaps = rice.decode(reader, count, code, size - count)
    return _accumulated(gaps, np.array([count], np.int64), np.array([size], np.int64))[0]


def decode_rest(reader: Reader, reading: Reading) -> dict[int, list[IntegerArray]]:
    """Return the indices of all sets whose gaps follow the sections, by code. Raises `IndexOutOfRange`."""
    found: dict[int, list[IntegerArray]] = {}
    if FIXED in reading:
        counts, sizes = _columns(reading[FIXED])
        each = _bit_lengths(sizes - counts)
        num_bits = int((counts * each).sum())
        data = reader.take((num_bits + 7) // 8)
        bits.check_padding(data, num_bits)
        widths = np.repeat(each.astype(np.uint8), counts)
        source = bits.BitReader(data)
        gaps = np.empty(widths.size, np.int64)
        for start in range(0, gaps.size, bits.CHUNK):
            part = slice(start, start + bits.CHUNK)
            gaps[part] = source.next(widths[part])
        found[FIXED] = _accumulated(gaps, counts, sizes)
    if ENTROPY in reading:
        counts, sizes = _columns(reading[ENTROPY])
        width = gap_width(int(sizes.max()))
        gaps = integers.decode(reader, Codec.ENTROPY, width, np.uint64, counts).view(np.int64)
        found[ENTROPY] = _accumulated(gaps, counts, sizes)
    return found


def gap_width(size: int) -> int:
    """Return the number of bits of a gap between indices below `size`."""
    return size.bit_length()


def name(code: int) -> str:
    """Return the code's name for reports."""
    return {FIXED: "pooled-fixed", ENTROPY: "pooled", ALL: "all"}.get(code, f"rice-{code}")


def _write_gaps(gaps: IntegerArray, where: IntegerArray, counts: IntegerArray, sizes: IntegerArray) -> None:
    """Write the gaps of all sets one after another."""
    gaps[:] = where
    gaps[1:] -= where[:-1]
    gaps[1:] -= 1
    held = counts > 0
    starts = (np.cumsum(counts) - counts)[held]
    gaps[starts] = where[starts]
    if gaps.size and (int(gaps.min()) < 0 or np.any(where[starts + counts[held] - 1] >= sizes[held])):
        raise LocalProtocolError(_NOT_ASCENDING)


def _best_rice(
    gaps: IntegerArray, starts: IntegerArray, counts: IntegerArray, sizes: IntegerArray
) -> tuple[IntegerArray, IntegerArray]:
    """Return, for each set, the best Rice parameter near that for evenly scattered indices, and its bits."""
    # For geometric gaps the best parameter is about log2(ln 2 · mean).
    guess = _bit_lengths(np.maximum(0.69 * (sizes - counts) / counts, 1.0).astype(np.int64)) - 1
    best, needed = guess, np.full(guess.size, np.iinfo(np.int64).max)
    for offset in (-1, 0, 1):
        parameter = np.clip(guess + offset, 0, MAX_RICE)
        cost = rice.sizes_in_bits(gaps, starts, counts, parameter)
        better = cost < needed
        best, needed = np.where(better, parameter, best), np.where(better, cost, needed)
    return best, needed


def _bit_lengths(values: IntegerArray) -> IntegerArray:
    """Return the number of bits that each integer, of up to 2^52, has; 0 for 0."""
    lengths: IntegerArray = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    return lengths


def _columns(pairs: list[tuple[int, int]]) -> tuple[IntegerArray, IntegerArray]:
    table = np.array(pairs, np.int64)
    return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])


def _accumulated(gaps: IntegerArray, counts: IntegerArray, sizes: IntegerArray) -> list[IntegerArray]:
    """Turn the gaps of several sets into indices, in place, and return those of each set. Raises `IndexOutOfRange`."""
    if gaps.size and (int(gaps.min()) < 0 or int(gaps.max()) >= int(sizes.max())):
        raise IndexOutOfRange(f"a gap leaves a layer of at most {int(sizes.max())} numbers")
    # Gaps and counts are each below 2^31 or so, as the layout is in memory: their sum stays in an int64.
    gaps += 1
    np.cumsum(gaps, out=gaps)
    ends = np.cumsum(counts)
    starts = ends - counts
    if starts.size == 1:
        gaps -= 1
    elif gaps.size:
        before = np.where(starts > 0, gaps[starts - 1], 0)
        gaps -= np.repeat(before + 1, counts)
    held = counts > 0
    last = gaps[ends[held] - 1]
    if np.any(last >= sizes[held]):
        raise IndexOutOfRange(f"an index of {int(last.max())} leaves its layer")
    return [gaps[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
