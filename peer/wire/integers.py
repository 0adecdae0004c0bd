"""A stream of n integers of w bits each, in the cheapest of four codecs: packed, entropy-coded, zstd, pooled.

Which one is decided from a sample and its histogram, not by trying each. Levels, residues, gaps between indices and
the bit patterns of real numbers all travel as such streams. What the streams of one frame share is its `Memory`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    NothingToRepeat,
    ParameterOutOfRange,
    UnknownCodec,
)
from peer.wire.reader import Reader, varint
from peer.wire.tokens import MAX_DIRECT, MIN_DIRECT, TokenMap, counts

WORTH_CODING = 256
"""Bits below which a stream's header and table cost about what a better code can save."""
WORTH_SHARING = 1 << 16
"""Integers beyond which the size of a table of its own no longer matters."""
POOLED_BITS = 1024
"""Streams of codes below this many bits share one stream of the frame, if there are several."""
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
    POOLED = 3


@dataclass
class Memory:
    """What the streams of one frame share."""

    tables: dict[int, tuple[TokenMap, ans.Table]] = field(default_factory=dict)
    """Map and table of the last entropy-coded stream of each width."""
    pooled_widths: frozenset[int] = frozenset()
    """Widths whose small streams of codes the writer pools."""
    pools: dict[int, list[UnsignedArray]] = field(default_factory=dict)
    """The pooled streams of each width in order: their codes when writing, the arrays to fill when reading."""
    pooled_gaps: list[tuple[npt.NDArray[np.int64], int, int]] = field(default_factory=list)
    """Likewise the gaps of few indices, with the size of their layer and their bits."""


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


def widths_to_pool(sizes_and_widths: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Return the widths of which a frame has several small streams of codes."""
    small = [width for size, width in sizes_and_widths if 0 < size * width < POOLED_BITS]
    return frozenset(width for width in small if small.count(width) > 1)


def is_pooled(size: int, width: int, memory: Memory) -> bool:
    """Return whether the writer pools a stream of `size` codes."""
    return width in memory.pooled_widths and 0 < size * width < POOLED_BITS


def encode_codes(values: UnsignedArray, width: int, plan: Plan | None, memory: Memory) -> tuple[Codec, list[Part]]:
    """Return the codec and the bytes of codes: as `encode`, unless they go to the frame's pool. Without a plan one is
    made where it is needed."""
    if plan is None:
        if is_pooled(values.size, width, memory):
            memory.pools.setdefault(width, []).append(values)
            return Codec.POOLED, []
        plan = plan_codes(values, width)
    return encode(values, width, plan, memory)


def encode_pools(memory: Memory) -> list[Part]:
    """Return the streams that end a frame: one for each pooled width, ascending."""
    parts: list[Part] = []
    for width in sorted(memory.pools):
        values = np.concatenate(memory.pools[width])
        codec, stream = encode(values, width, plan_codes(values, width), memory)
        parts += [bytes((codec,)), *stream]
    return parts


def encode(values: UnsignedArray, width: int, plan: Plan, memory: Memory) -> tuple[Codec, list[Part]]:
    """Return the codec that was used in the end and the bytes of `values: uint[n]`, all below 2**width.

    Where the planned codec turns out no shorter than packing, which a sample can hide, the stream is packed.
    """
    packed_size = bits.packed_size(values.size, width)
    parts: list[Part] | None = None
    if plan.tokens is not None:
        parts = _entropy_encode(values, plan.tokens, packed_size, memory)
    elif plan.codec is Codec.ZSTD:
        compressed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(bits.as_bytes(values).data)
        parts = [varint(len(compressed)), compressed]
        if sum(map(len, parts)) >= packed_size:
            parts = None
    if parts is None:
        return Codec.PACKED, [bits.pack(values, width).data]
    return plan.codec, parts


def decode_codes(reader: Reader, codec: int, count: int, width: int, memory: Memory) -> UnsignedArray:
    """Return codes, uint8[count] for up to 8 bits and uint16[count] above. Pooled ones come with `decode_pools`."""
    if codec == Codec.POOLED:
        codes: UnsignedArray = np.empty(count, code_type(width))
        memory.pools.setdefault(width, []).append(codes)
        return codes
    return decode(reader, codec, count, width, code_type(width), memory)


def decode_pools(reader: Reader, memory: Memory) -> None:
    """Fill the arrays that `decode_codes` has promised to."""
    for width in sorted(memory.pools):
        arrays = memory.pools[width]
        codes = decode(reader, reader.byte(), sum(a.size for a in arrays), width, code_type(width), memory)
        start = 0
        for array in arrays:
            array[:] = codes[start : start + array.size]
            start += array.size


def decode(reader: Reader, codec: int, count: int, width: int, dtype: npt.DTypeLike, memory: Memory) -> UnsignedArray:
    """Return `uint[count]` of `dtype`, all below 2**width. Allocates a few bytes a number beside the result."""
    if codec == Codec.PACKED:
        return bits.unpack(reader.take(bits.packed_size(count, width)), count, width, dtype)
    if codec == Codec.ENTROPY:
        return _entropy_decode(reader, count, width, dtype, memory)
    if codec == Codec.ZSTD:
        return _zstd_decode(reader, count, width, dtype)
    raise UnknownCodec(f"a stream of integers cannot have the codec {codec} here")


def code_type(width: int) -> type[np.uint8] | type[np.uint16]:
    """Return the type that holds codes of that many bits."""
    return np.uint8 if width <= 8 else np.uint16


_SAME_TABLE = 1 << 4
_FOLDS, _HAS_RAW_BITS = 1 << 4, 1 << 5


def _entropy_encode(values: UnsignedArray, tokens: TokenMap, worth: int, memory: Memory) -> list[Part] | None:
    """Return the entropy-coded stream, or None where it takes `worth` bytes or more."""
    symbols = tokens.tokens(values)
    histogram = counts(symbols)
    table = ans.Table.of_counts(histogram[: int(histogram.nonzero()[0][-1]) + 1])
    parameter, table_code = table.encode()
    header = bytearray((tokens.direct | tokens.folds * _FOLDS, table.num_tokens - 1))
    if tokens.raw_bits:
        header[0] |= _HAS_RAW_BITS
        header.append(tokens.raw_bits)
    header += varint(tokens.centre) + table_code
    cost = table.bits_for(histogram)
    raw_bits = int(histogram @ tokens.raw_widths.astype(np.int64))
    first = parameter << 5
    if values.size < WORTH_SHARING and tokens.width in memory.tables:
        shared_tokens, shared_table = memory.tables[tokens.width]
        shared_symbols = symbols if shared_tokens == tokens else shared_tokens.tokens(values)
        shared_histogram = counts(shared_symbols)
        shared_raw_bits = int(shared_histogram @ shared_tokens.raw_widths.astype(np.int64))
        shared_cost = shared_table.bits_for(shared_histogram)
        if shared_cost + shared_raw_bits <= cost + raw_bits + 8 * len(header):
            tokens, table, symbols = shared_tokens, shared_table, shared_symbols
            cost, raw_bits, first, header = shared_cost, shared_raw_bits, _SAME_TABLE, bytearray()
    lanes_log2 = ans.lanes_for(cost) if table.num_tokens > 1 else 0
    header.insert(0, first | lanes_log2)
    if len(header) + (cost + raw_bits) / 8 >= worth:
        return None
    parts: list[Part] = [bytes(header)]
    if table.num_tokens > 1:
        states, words = ans.encode(symbols, table, lanes_log2)
        parts += [bits.as_bytes(states).data, bits.as_bytes(words).data]
    if raw_bits:
        parts.append(tokens.raw(values, symbols, raw_bits).data)
    if sum(map(len, parts)) >= worth:
        return None
    memory.tables[tokens.width] = tokens, table
    return parts


def _entropy_decode(reader: Reader, count: int, width: int, dtype: npt.DTypeLike, memory: Memory) -> UnsignedArray:
    first = reader.byte()
    lanes_log2 = first & 15
    if first >> 7 or lanes_log2 > ans.MAX_LANES_LOG2:
        raise ParameterOutOfRange("an entropy-coded stream has a first byte that cannot be")
    if not first & _SAME_TABLE:
        memory.tables[width] = _read_table(reader, width, first >> 5)
    elif width not in memory.tables:
        raise NothingToRepeat(f"a stream repeats the table of one of {width} bits, and there is none")
    tokens, table = memory.tables[width]
    if table.num_tokens > 1:
        states = np.frombuffer(reader.take(4 << lanes_log2), "<u4").astype(np.uint32)
        symbols = ans.decode(states, reader, table, count)
    else:
        symbols = np.zeros(count, np.uint8)
    if not tokens.has_raw_bits:
        return tokens.values(symbols, memoryview(b""), dtype)
    raw_bits = int(counts(symbols) @ tokens.raw_widths.astype(np.int64))
    raw = reader.take((raw_bits + 7) // 8)
    bits.check_padding(raw, raw_bits)
    return tokens.values(symbols, raw, dtype)


def _read_table(reader: Reader, width: int, parameter: int) -> tuple[TokenMap, ans.Table]:
    form = reader.byte()
    num_tokens = reader.byte() + 1
    raw_bits = reader.byte() if form & _HAS_RAW_BITS else 0
    centre = reader.varint()
    direct = form & 15
    if form >> 6 or not MIN_DIRECT <= direct <= MAX_DIRECT or raw_bits >= width or centre >> width:
        raise ParameterOutOfRange("an entropy-coded stream has a map of tokens that cannot be")
    tokens = TokenMap(width, centre, bool(form & _FOLDS), raw_bits, direct)
    if num_tokens > tokens.max_tokens:
        raise LevelOutOfRange(f"an entropy-coded stream has {num_tokens} tokens where {tokens.max_tokens} suffice")
    return tokens, ans.Table.decode(reader, num_tokens, parameter)


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
    return 8 * (9 + 0.4 * num_tokens)


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
