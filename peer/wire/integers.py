"""A stream of n integers of w bits each, in the cheapest of three codecs: packed, entropy-coded, zstd.

Which one is decided from a sample and its histogram, not by trying each. Levels, residues, gaps between indices and
the bit patterns of real numbers all travel as such streams.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from peer.wire import ans, bits
from peer.wire.bits import UnsignedArray
from peer.wire.errors import (
    DecompressionBomb,
    LevelOutOfRange,
    MalformedCompression,
    ParameterOutOfRange,
    UnknownCodec,
)
from peer.wire.reader import Reader, varint
from peer.wire.tokens import MAX_DIRECT, MIN_DIRECT, TokenMap, counts

WORTH_CODING = 512
"""Bits below which a stream's header and table cost about what a better code can save."""
SAMPLE = 1 << 15
ZSTD_SAMPLE = 1 << 13
ZSTD_LEVEL = 1
MAX_WINDOW = 8 << 20
"""RFC 8878 recommends that decoders support at least this window; frames that need more are refused."""

Part: TypeAlias = bytes | memoryview


class Codec(enum.IntEnum):
    """How a stream of integers is coded."""

    PACKED = 0
    ENTROPY = 1
    ZSTD = 2


@dataclass(frozen=True)
class Plan:
    """What the sample said: a codec, about how many bits it needs, and the map of tokens for entropy coding."""

    codec: Codec
    bits_needed: float = 0.0
    tokens: TokenMap | None = None


def plan_codes(values: UnsignedArray, width: int) -> Plan:
    """Return how to code levels or residues: `values: uint8[n]` or `uint16[n]`, below 2**width, width 1 to 16."""
    if values.size * width < WORTH_CODING:
        return packed_plan(values.size, width)
    return _plan_from(_sampled(values, SAMPLE), values, width)


def plan_change(values: UnsignedArray, previous: UnsignedArray, width: int) -> Plan:
    """Return how to code (values − previous) mod 2**width, judged by a sample, so that only that is computed."""
    if values.size * width < WORTH_CODING:
        return packed_plan(values.size, width)
    sample = _sampled(values, SAMPLE) - _sampled(previous, SAMPLE)
    sample &= sample.dtype.type((1 << width) - 1)
    return _plan_from(sample, values, width)


def _plan_from(sample: UnsignedArray, values: UnsignedArray, width: int) -> Plan:
    histogram = np.bincount(sample, minlength=1 << width)
    entropy = entropy_of(histogram)
    # The most frequent code is the middle of what quantization gives; folding around it puts the rare codes last.
    centre = int(histogram.argmax())
    direct = MAX_DIRECT if width <= 8 else 5 if values.size < 1 << 14 else 7
    plan = packed_plan(values.size, width)
    coded = values.size * entropy + _overhead(int(np.count_nonzero(histogram)))
    if coded < 0.99 * plan.bits_needed:
        plan = Plan(Codec.ENTROPY, coded, TokenMap(width, centre, folds=True, direct=direct))
    if entropy < 0.97 * width:
        zstd = _zstd_bits(sample, values.size)
        if zstd < 0.95 * plan.bits_needed:
            return Plan(Codec.ZSTD, zstd)
    return plan


def plan_floats(patterns: UnsignedArray, exponent_bits: int) -> Plan:
    """Return how to code bit patterns of reals. The map of tokens is for patterns rotated left by one: exponent first,
    then mantissa, then sign."""
    width = 8 * patterns.itemsize
    if patterns.size * exponent_bits < WORTH_CODING:
        return packed_plan(patterns.size, width)
    sample = _sampled(patterns, SAMPLE)
    kind = patterns.dtype.type
    # Only the exponent is worth modelling; mantissa bits are all but uniform.
    raw_bits = width - exponent_bits
    exponents = (sample << kind(1)) >> kind(raw_bits)
    histogram = np.bincount(exponents.astype(np.int64))
    plan = packed_plan(patterns.size, width)
    coded = patterns.size * (raw_bits + entropy_of(histogram)) + _overhead(int(np.count_nonzero(histogram)))
    if coded < 0.98 * plan.bits_needed:
        tokens = TokenMap(width, raw_bits=raw_bits, direct=min(exponent_bits, 7))
        plan = Plan(Codec.ENTROPY, coded, tokens)
    zstd = _zstd_bits(sample, patterns.size)
    return Plan(Codec.ZSTD, zstd) if zstd < 0.95 * plan.bits_needed else plan


def plan_gaps(gaps: UnsignedArray, width: int) -> Plan:
    """Return the entropy code of `gaps: uint64[k]` between indices."""
    tokens = TokenMap(width, direct=min(4, max(width, MIN_DIRECT)))
    histogram = counts(tokens.tokens(gaps))
    raw = float(histogram @ tokens.raw_widths)
    cost = gaps.size * entropy_of(histogram) + raw + _overhead(int(np.count_nonzero(histogram)))
    return Plan(Codec.ENTROPY, cost, tokens)


def plan_wide(values: UnsignedArray, width: int) -> Plan:
    """Return how to code folded whole integers: `values: uint64[n]`, below 2**width."""
    plan = packed_plan(values.size, width)
    coded = plan_gaps(values, width)
    return coded if coded.bits_needed < 0.98 * plan.bits_needed else plan


def packed_plan(count: int, width: int) -> Plan:
    """Return the plan of packing."""
    return Plan(Codec.PACKED, float(count * width))


def encode(values: UnsignedArray, width: int, plan: Plan) -> tuple[Codec, list[Part]]:
    """Return the bytes of `values: uint[n]`, all below 2**width, and the codec that was used in the end.

    Where the planned codec turns out no shorter than packing, which a sample can hide, the stream is packed.
    """
    packed_size = bits.packed_size(values.size, width)
    parts: list[Part] | None = None
    if plan.tokens is not None:
        parts = _entropy_encode(values, plan.tokens, packed_size)
    elif plan.codec is Codec.ZSTD:
        compressed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(bits.as_bytes(values).data)
        parts = [varint(len(compressed)), compressed]
    if parts is None or sum(len(part) for part in parts) >= packed_size:
        return Codec.PACKED, [bits.pack(values, width).data]
    return plan.codec, parts


def decode(reader: Reader, codec: int, count: int, width: int, dtype: npt.DTypeLike) -> UnsignedArray:
    """Return `uint[count]` of `dtype`, all below 2**width. Allocates a few bytes a number beside the result."""
    if codec == Codec.PACKED:
        return bits.unpack(reader.take(bits.packed_size(count, width)), count, width, dtype)
    if codec == Codec.ENTROPY:
        return _entropy_decode(reader, count, width, dtype)
    if codec == Codec.ZSTD:
        return _zstd_decode(reader, count, width, dtype)
    raise UnknownCodec(f"a stream of integers has the unknown codec {codec}")


def _entropy_encode(values: UnsignedArray, tokens: TokenMap, worth: int) -> list[Part] | None:
    """Return the entropy-coded stream, or None as soon as it is clear that it takes more than `worth` bytes."""
    symbols = tokens.tokens(values)
    histogram = counts(symbols)
    histogram = histogram[: int(np.flatnonzero(histogram)[-1]) + 1]
    raw_bits = int(histogram @ tokens.raw_widths[: histogram.size].astype(np.int64))
    table = ans.Table.of_counts(histogram)
    cost = table.bits_for(histogram) if histogram.size > 1 else 0.0
    if cost + raw_bits >= 8 * worth:
        return None
    lanes_log2 = ans.lanes_for(cost)
    rice_parameter, table_code = table.encode() if histogram.size > 1 else (0, b"")
    header = bytearray(
        (
            tokens.direct | tokens.folds << 4 | rice_parameter << 5,
            table.scale - 8 | lanes_log2 << 4,
            histogram.size - 1,
            tokens.raw_bits,
        )
    )
    header += varint(tokens.centre)
    header += table_code
    parts: list[Part] = []
    if histogram.size > 1:
        states, words = ans.encode(symbols, table, lanes_log2)
        header += varint(words.size)
        parts = [bytes(header), bits.as_bytes(states).data, bits.as_bytes(words).data]
    else:
        parts = [bytes(header)]
    if raw_bits:
        parts.append(tokens.raw(values, symbols, raw_bits).data)
    return parts


def _entropy_decode(reader: Reader, count: int, width: int, dtype: npt.DTypeLike) -> UnsignedArray:
    first, second = reader.byte(), reader.byte()
    num_tokens = reader.byte() + 1
    raw_bits = reader.byte()
    centre = reader.varint()
    direct, lanes_log2 = first & 15, second >> 4
    if (
        first >> 7
        or second & 8
        or not MIN_DIRECT <= direct <= MAX_DIRECT
        or lanes_log2 > ans.MAX_LANES_LOG2
        or raw_bits >= width
        or centre >> width
    ):
        raise ParameterOutOfRange("an entropy-coded stream has parameters that cannot be")
    tokens = TokenMap(width, centre, bool(first & 16), raw_bits, direct)
    if num_tokens > tokens.max_tokens:
        raise LevelOutOfRange(f"an entropy-coded stream has {num_tokens} tokens where {tokens.max_tokens} suffice")
    if num_tokens > 1:
        table = ans.Table.decode(reader, num_tokens, 8 + (second & 7), first >> 5 & 3)
        num_words = reader.varint()
        states = np.frombuffer(reader.take(4 << lanes_log2), "<u4").astype(np.uint32)
        words = np.frombuffer(reader.take(2 * num_words), "<u2").astype(np.uint16)
        symbols = ans.decode(states, words, table, count)
    else:
        symbols = np.zeros(count, np.uint8)
    raw_total = int(counts(symbols) @ tokens.raw_widths.astype(np.int64))
    raw = reader.take((raw_total + 7) // 8)
    bits.check_padding(raw, raw_total)
    return tokens.values(symbols, raw, dtype)


def _zstd_decode(reader: Reader, count: int, width: int, dtype: npt.DTypeLike) -> UnsignedArray:
    data = reader.take(reader.varint())
    out: UnsignedArray = np.empty(count, dtype)
    try:
        announced = zstandard.get_frame_parameters(data).content_size
        if announced != out.nbytes:
            raise DecompressionBomb(
                f"a compressed section announces {announced} bytes where its layer has {out.nbytes}"
            )
        plain = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedCompression(f"a compressed section cannot be decompressed: {error}") from error
    if len(plain) != out.nbytes:
        raise MalformedCompression("a compressed section does not hold what it announces")
    bits.as_bytes(out)[:] = np.frombuffer(plain, np.uint8)
    if width < 8 * out.itemsize and count and int(out.max()) >> width:
        raise LevelOutOfRange(f"a compressed section holds integers beyond {width} bits")
    return out


def entropy_of(histogram: npt.NDArray[np.int64]) -> float:
    """Return the empirical entropy of a histogram in bits an element."""
    present = histogram[histogram > 0]
    total = int(present.sum())
    if total == 0:
        return 0.0
    return float(np.log2(total) - (present @ np.log2(present)) / total)


def _overhead(num_tokens: int) -> float:
    """Return about how many bits an entropy-coded stream spends on its header and table."""
    return 8 * (11 + 0.4 * num_tokens)


def _zstd_bits(sample: UnsignedArray, count: int) -> float:
    """Return about how many bits zstd needs for `count` elements; infinite where the sample says too little."""
    piece = sample[:ZSTD_SAMPLE]
    if piece.size < ZSTD_SAMPLE // 2:
        return float("inf")
    compressed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(bits.as_bytes(piece).data)
    return 8.0 * len(compressed) * count / piece.size


def _sampled(values: UnsignedArray, size: int) -> UnsignedArray:
    """Return about `size` elements: eight pieces spread evenly over `values`, or all of them where they are few."""
    if values.size <= size:
        return values
    piece = size // 8
    starts = np.linspace(0, values.size - piece, 8).astype(np.int64)
    return np.concatenate([values[start : start + piece] for start in starts.tolist()])
