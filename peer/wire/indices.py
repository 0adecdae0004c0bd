"""Which k of n coordinates: four codes for a set of indices, of which the cheapest is chosen for each layer.

`RICE`: gaps as Rice code; the parameter is the code's number, 0 to 28. `FIXED`: the gaps of a few indices, in just the
bits that n − k needs, in a bit string that all layers share. `ENTROPY`: gaps as a span of an entropy-coded stream that
all layers share. `ALL`: nothing, as k = n. The gap of an index is the number of coordinates skipped since the one
before, so unsorted and repeated indices cannot be expressed.

A bitmap is the Rice code with parameter 0, cut behind its last one. Elias–Fano never wins: with the same parameter its
low part is as long as that of Rice, and its high part ends at ⌊index/2^r⌋, the sum of all gaps floored once, where
Rice's ends at the sum of the floored gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from peer.errors import LocalProtocolError
from peer.wire import bits, integers, rice
from peer.wire.errors import IndexCountOutOfRange, IndexOutOfRange
from peer.wire.integers import Part
from peer.wire.plans import Codec, plan_gaps
from peer.wire.reader import Reader

MAX_RICE = 28
FIXED, ENTROPY, ALL = 29, 30, 31
MAX_FIXED = 8
"""Indices of a layer beyond which the writer does not use the fixed code."""
WORTH_MODELLING = 48
"""Indices of all layers below which a table costs more than it can save."""

IndexArray = npt.NDArray[np.int64]


def encode(sets: Sequence[tuple[IndexArray, int]]) -> tuple[list[tuple[int, bytes]], list[Part]]:
    """Return for each set its code and what of it belongs into its section, and what belongs behind all sections.

    `sets`: of each layer its indices, int64[k], and its size n. Raises `LocalProtocolError` unless they ascend
    strictly below n.
    """
    counts = np.array([where.size for where, _ in sets], np.int64)
    sizes = np.array([size for _, size in sets], np.int64)
    gaps = _gaps([where for where, _ in sets], counts, sizes)
    starts = np.cumsum(counts) - counts
    codes = np.where(counts == sizes, ALL, 0)
    own = np.flatnonzero((codes != ALL) & (counts > 0))
    if own.size:
        parameters, needed = _best_rice(gaps, starts[own], counts[own], sizes[own])
        codes[own] = parameters
        in_bytes = (needed + 7) // 8
        fixed = counts[own] * _bit_lengths(sizes[own] - counts[own])
        # Where a Rice code takes a byte of its own, so few bits beside those of other layers are always fewer.
        few = (fixed <= 8) | (counts[own] <= MAX_FIXED) & (fixed < 8 * in_bytes)
        codes[own[few]] = FIXED
        own, in_bytes = own[~few], in_bytes[~few]
    parts: list[Part] = []
    if own.size and int(counts[own].sum()) >= WORTH_MODELLING:
        plain = gaps if own.size == counts.size else _chosen(gaps, starts, counts, own)
        width = gap_width(int(sizes[own].max()))
        plan = plan_gaps(plain.view(np.uint64), width, counts[own])
        if plan.bits_needed < 8 * int(in_bytes.sum()):
            codec, stream = integers.encode(plain.view(np.uint64), width, plan, counts[own])
            if codec is Codec.ENTROPY:
                codes[own] = ENTROPY
                parts = stream
    fixed_gaps = np.flatnonzero(codes == FIXED)
    if fixed_gaps.size:
        chosen = _chosen(gaps, starts, counts, fixed_gaps)
        widths = np.repeat(_bit_lengths(sizes[fixed_gaps] - counts[fixed_gaps]), counts[fixed_gaps]).astype(np.uint8)
        writer = bits.Writer(int(widths.sum(dtype=np.int64)))
        for start in range(0, chosen.size, bits.CHUNK):
            part = slice(start, start + bits.CHUNK)
            writer.append(chosen[part].view(np.uint64), widths[part])
        parts = [writer.finish().tobytes(), *parts]
    in_sections = [
        (code, rice.encode(gaps[start : start + count], code) if code <= MAX_RICE else b"")
        for code, start, count in zip(codes.tolist(), starts.tolist(), counts.tolist(), strict=True)
    ]
    return in_sections, parts


@dataclass
class Reading:
    """The sets of indices whose gaps follow the last section, in the order of the sections."""

    fixed: list[tuple[int, int]] = field(default_factory=list)
    """Of each: k and n."""
    entropy: list[tuple[int, int]] = field(default_factory=list)


def decode(reader: Reader, code: int, count: int, size: int, reading: Reading) -> IndexArray | tuple[int, int]:
    """Return `int64[count]`, strictly ascending below `size`; or where to find it in what `decode_rest` returns: the
    code, and the number among those of that code. `count` is at most `size`."""
    if code == ALL:
        if count != size:
            raise IndexCountOutOfRange(f"a sparse layer claims all of {size} coordinates and gives {count}")
        return np.arange(size)
    if code == FIXED:
        reading.fixed.append((count, size))
        return FIXED, len(reading.fixed) - 1
    if code == ENTROPY:
        reading.entropy.append((count, size))
        return ENTROPY, len(reading.entropy) - 1
    gaps = rice.decode(reader, count, code, size - count)
    return _accumulated(gaps, np.array([count], np.int64), np.array([size], np.int64))[0]


def decode_rest(reader: Reader, reading: Reading) -> dict[int, list[IndexArray]]:
    """Return the indices of all sets whose gaps follow the sections, by code. Raises `IndexOutOfRange`."""
    found: dict[int, list[IndexArray]] = {}
    if reading.fixed:
        counts, sizes = _columns(reading.fixed)
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
    if reading.entropy:
        counts, sizes = _columns(reading.entropy)
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


def _gaps(sets: Sequence[IndexArray], counts: IndexArray, sizes: IndexArray) -> IndexArray:
    """Return the gaps of all sets one after another."""
    where = np.concatenate(sets) if len(sets) > 1 else sets[0]
    gaps = where.copy()
    gaps[1:] -= where[:-1]
    gaps[1:] -= 1
    held = counts > 0
    starts = (np.cumsum(counts) - counts)[held]
    gaps[starts] = where[starts]
    if gaps.size and (int(gaps.min()) < 0 or np.any(where[starts + counts[held] - 1] >= sizes[held])):
        raise LocalProtocolError("sparse indices must be strictly ascending and within their layer")
    return gaps


def _chosen(gaps: IndexArray, starts: IndexArray, counts: IndexArray, own: IndexArray) -> IndexArray:
    """Return the gaps of some sets one after another."""
    return np.concatenate([gaps[starts[i] : starts[i] + counts[i]] for i in own.tolist()])


def _best_rice(
    gaps: IndexArray, starts: IndexArray, counts: IndexArray, sizes: IndexArray
) -> tuple[IndexArray, IndexArray]:
    """Return of each set the best Rice parameter near the one for evenly scattered indices, and its bits."""
    # For geometric gaps the best parameter is about log2(ln 2 · mean).
    guess = _bit_lengths(np.maximum(0.69 * (sizes - counts) / counts, 1.0).astype(np.int64)) - 1
    best, needed = guess, np.full(guess.size, np.iinfo(np.int64).max)
    for offset in (-1, 0, 1):
        parameter = np.clip(guess + offset, 0, MAX_RICE)
        cost = rice.sizes_in_bits(gaps, starts, counts, parameter)
        better = cost < needed
        best, needed = np.where(better, parameter, best), np.where(better, cost, needed)
    return best, needed


def _bit_lengths(values: IndexArray) -> IndexArray:
    """Return the number of bits that each integer, of up to 2^52, has; 0 for 0."""
    lengths: IndexArray = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    return lengths


def _columns(pairs: list[tuple[int, int]]) -> tuple[IndexArray, IndexArray]:
    table = np.array(pairs, np.int64)
    return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])


def _accumulated(gaps: IndexArray, counts: IndexArray, sizes: IndexArray) -> list[IndexArray]:
    """Turn the gaps of several sets into the indices that they lead to, in place, and return those of each set. Raises
    `IndexOutOfRange`."""
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
