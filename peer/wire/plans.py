"""Choice of the code of a stream, from histograms, never by trying every codec.

A short stream is counted whole, span by span, so that spans that are alike can share a table; of a long one, which has
a single span, a sample is counted.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from peer import native
from peer.wire import bits
from peer.wire.bits import ByteArray, IntegerArray, UnsignedArray, pointer
from peer.wire.grouping import group_spans, overhead_bits
from peer.wire.tokens import MAX_DIRECT, MIN_DIRECT, TokenMap, counts

WORTH_CODING = 256
"""Bits below which a stream's header and table cost about as much as a better code can save."""
WORTH_ORDERING = 1 << 12
"""Integers beyond which the order of the tokens in the table does not matter."""
SAMPLE = 1 << 15
WORTH_MATCHING = 1 << 14
"""Integers below which repetitions are not looked for."""
ZSTD_SAMPLE = 1 << 13
ZSTD_LEVEL = 1


class Codec(enum.IntEnum):
    """Code of a stream of integers."""

    PACKED = 0
    ENTROPY = 1
    ZSTD = 2
    POOLED = 3


@dataclass(frozen=True)
class CodingPlan:
    """Result of a histogram: a codec, its approximate bits, and for entropy coding the map of tokens, the table of each
    span, uint8[spans] (None: one table), and the tokens if they are known already, uint8[n]."""

    codec: Codec
    bits_needed: float = 0.0
    tokens: TokenMap | None = None
    groups: npt.NDArray[np.uint8] | None = None
    symbols: ByteArray | None = None


def packed_plan(count: int, width: int) -> CodingPlan:
    """Return the plan of packing."""
    return CodingPlan(Codec.PACKED, float(count * width))


def plan_codes(values: UnsignedArray, width: int, sizes: IntegerArray | None = None) -> CodingPlan:
    """Return the plan for levels or residues: `values: uint8[n]` or `uint16[n]`, below 2**width, width 1 to 16, in
    spans of `sizes: int64[spans]`, or in one."""
    if values.size * width < WORTH_CODING:
        return packed_plan(values.size, width)
    sample = _sampled(values, SAMPLE)
    if sizes is None or sizes.size == 1:
        return _plan_from(sample, _histogram(sample, width), values.size, width)
    tokens = _map_of(sample, values.size, width)
    # A code of up to eight bits is a token already, but for its place in the table, which does not matter yet.
    symbols = values.view(np.uint8) if width <= 8 else tokens.tokens(values)
    grouping = group_spans(symbols, sizes, width if width <= 8 else 0)
    if grouping is None:
        return packed_plan(values.size, width)
    needed, known = grouping.bits, None
    if width > 8:
        needed, known = needed + float(grouping.counts @ tokens.raw_widths), symbols
    return _better(CodingPlan(Codec.ENTROPY, needed, tokens, grouping.groups, known), sample, values.size, width, 0.99)


def plan_change(values: UnsignedArray, previous: UnsignedArray, width: int) -> CodingPlan:
    """Return the plan for (values − previous) mod 2**width, judged by a sample, so that only the sample is computed."""
    if values.size * width < WORTH_CODING:
        return packed_plan(values.size, width)
    sample = _sampled(values, SAMPLE) - _sampled(previous, SAMPLE)
    sample &= sample.dtype.type((1 << width) - 1)
    return _plan_from(sample, _histogram(sample, width), values.size, width)


def _plan_from(sample: UnsignedArray, histogram: IntegerArray, count: int, width: int) -> CodingPlan:
    coded = count * entropy_of(histogram) + overhead_bits(int(np.count_nonzero(histogram)))
    # The map is worth finding only where it will be used.
    tokens = _map_for(histogram, count, width) if coded < count * width else TokenMap(width)
    return _better(CodingPlan(Codec.ENTROPY, coded, tokens), sample, count, width, 0.99)


def _better(coded: CodingPlan, sample: UnsignedArray, count: int, width: int, margin: float) -> CodingPlan:
    """Return the entropy code, packing or zstd."""
    packed = float(count * width)
    is_coded = coded.bits_needed < margin * packed
    # Even if single integers are evenly spread there may be repetitions, but nobody sends such streams.
    if count >= WORTH_MATCHING and coded.bits_needed < 0.97 * packed:
        zstd = _zstd_bits(sample, count)
        # Entropy coding is faster, and its estimate exact.
        if zstd < 0.95 * (coded.bits_needed if is_coded else packed):
            return CodingPlan(Codec.ZSTD, zstd)
    return coded if is_coded else packed_plan(count, width)


def plan_floats(patterns: UnsignedArray, exponent_bits: int, sizes: IntegerArray | None = None) -> CodingPlan:
    """Return the plan for bit patterns of reals, in spans of `sizes: int64[spans]`, or in one. The map of tokens is for
    patterns rotated left by one: exponent first, then mantissa, then sign."""
    width = 8 * patterns.itemsize
    packed = packed_plan(patterns.size, width)
    if patterns.size * exponent_bits < 2 * WORTH_CODING:
        return packed
    kind = patterns.dtype.type
    # Only the exponent is worth modelling; mantissa bits are all but uniform.
    raw_bits = width - exponent_bits
    tokens = TokenMap(width, raw_bits=raw_bits, direct=min(exponent_bits, 7))
    sample = _sampled(patterns, SAMPLE)
    if sizes is None or sizes.size == 1:
        exponents = (sample << kind(1)) >> kind(raw_bits)
        histogram = np.bincount(exponents.astype(np.int64))
        coded = patterns.size * (raw_bits + entropy_of(histogram)) + overhead_bits(int(np.count_nonzero(histogram)))
        plan = CodingPlan(Codec.ENTROPY, coded, tokens)
    else:
        plan = _grouped_plan(tokens, tokens.tokens(patterns << kind(1)), sizes)
    if plan.bits_needed >= 0.98 * packed.bits_needed:
        plan = packed
    zstd = _zstd_bits(sample, patterns.size)
    return CodingPlan(Codec.ZSTD, zstd) if zstd < 0.95 * plan.bits_needed else plan


def plan_gaps(gaps: UnsignedArray, width: int, sizes: IntegerArray | None = None) -> CodingPlan:
    """Return the entropy code of `gaps: uint64[k]` between indices."""
    tokens = TokenMap(width, direct=min(4, max(width, MIN_DIRECT)))
    spans = np.array([gaps.size], np.int64) if sizes is None else sizes
    return _grouped_plan(tokens, tokens.tokens(gaps), spans)


def _grouped_plan(tokens: TokenMap, symbols: ByteArray, sizes: IntegerArray) -> CodingPlan:
    """Return the entropy code of integers with these tokens, uint8[n], in spans of `sizes`."""
    grouping = group_spans(symbols, sizes)
    assert grouping is not None, "only codes are refused"
    needed = grouping.bits + float(grouping.counts @ tokens.raw_widths)
    return CodingPlan(Codec.ENTROPY, needed, tokens, grouping.groups, symbols)


def plan_wide(values: UnsignedArray, width: int) -> CodingPlan:
    """Return the plan for folded whole integers: `values: uint64[n]`, below 2**width."""
    packed = packed_plan(values.size, width)
    coded = plan_gaps(values, width)
    return coded if coded.bits_needed < 0.98 * packed.bits_needed else packed


def entropy_of(histogram: IntegerArray) -> float:
    """Return the empirical entropy of a histogram in bits an element."""
    present = histogram[histogram > 0]
    total = int(present.sum())
    if total == 0:
        return 0.0
    return float(np.log2(total) - (present @ np.log2(present)) / total)


def _histogram(values: UnsignedArray, width: int) -> IntegerArray:
    """Return int64[2**width]."""
    if width <= 8:
        return counts(values.view(np.uint8))[: 1 << width]
    return np.bincount(values, minlength=1 << width)


_LOGS = np.log2(np.maximum(np.arange(WORTH_ORDERING), 0.4))
"""log₂ of each count below `WORTH_ORDERING`, and of 0.4 for 0."""


def _map_of(sample: UnsignedArray, count: int, width: int) -> TokenMap:
    """Return the map of tokens for codes of which `sample` has some, or all."""
    if native.lib is None or width > MAX_DIRECT:
        return _map_for(_histogram(sample, width), count, width)
    form = native.ffi.new("int32_t[2]")
    native.lib.wire_map_codes(
        pointer(sample), sample.size, count, width, native.pointer(_LOGS, "double[]"), form
    )  # fmt: skip
    return TokenMap(width, form[0], folds=bool(form[1]))


def _map_for(histogram: IntegerArray, count: int, width: int) -> TokenMap:
    """Return the map of tokens for codes with this histogram."""
    # The most frequent code is the middle of quantized values; folding around it puts the rare codes last.
    centre = int(histogram.argmax())
    if width > MAX_DIRECT:
        return TokenMap(width, centre, folds=True, direct=5 if count < 1 << 14 else 7)
    folded = TokenMap(width, centre, folds=True)
    if count >= WORTH_ORDERING:
        return folded
    # For codes in two heaps, such as those of kept values, the natural order makes the shorter table. It begins after
    # the longest run of absent codes, in a circle.
    present = histogram.nonzero()[0]
    gaps = present.copy()
    gaps[1:] -= present[:-1]
    gaps[0] += (1 << width) - present[-1]
    natural = TokenMap(width, int(present[int(gaps.argmax())]))
    weights = _LOGS[histogram]
    roughness = []
    for tokens in (folded, natural):
        ordered = weights[tokens.order_of_codes]
        roughness.append(np.abs(ordered[1:] - ordered[:-1]).sum())
    return natural if roughness[1] < roughness[0] else folded


def _zstd_bits(sample: UnsignedArray, count: int) -> float:
    """Return the approximate bits that zstd needs for `count` elements; infinite if they are too few to try."""
    if count < WORTH_MATCHING:
        return float("inf")
    piece = sample[:ZSTD_SAMPLE]
    compressed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(bits.as_bytes(piece).data)
    return 8.0 * len(compressed) * count / piece.size


def _sampled(values: UnsignedArray, size: int) -> UnsignedArray:
    """Return about `size` elements: eight pieces spread evenly over `values`, or all of them where they are few."""
    if values.size <= size:
        return values
    piece = size // 8
    starts = np.linspace(0, values.size - piece, 8).astype(np.int64)
    return np.concatenate([values[start : start + piece] for start in starts.tolist()])
