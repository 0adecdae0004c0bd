"""A stream of n integers of w bits each, in the cheapest of four codecs: packed, entropy-coded, zstd, pooled.

Which one is decided from a sample and its histogram, not by trying each. Levels, residues, gaps between indices and
the bit patterns of real numbers all travel as such streams. What the streams of one frame share is its `Memory`.
"""

from __future__ import annotations

import enum
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
WORTH_ORDERING = 1 << 12
"""Integers beyond which the order of the tokens in the table does not matter."""
POOLED_BITS = 2048
"""Streams of codes that would need less than this many bits share one of the frame."""
SAMPLE = 1 << 15
WORTH_MATCHING = 1 << 14
"""Integers below which nobody looks for repetitions."""
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
    pooling: bool = False
    """Whether the writer pools small streams."""
    pools: dict[tuple[int, int], list[UnsignedArray]] = field(default_factory=dict)
    """The streams of each pool in order: their codes when writing, the arrays to fill when reading."""
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
    plan = packed_plan(values.size, width)
    coded = values.size * entropy + _overhead(int(np.count_nonzero(histogram)))
    if coded < 0.99 * plan.bits_needed:
        plan = Plan(Codec.ENTROPY, coded, _map_for(histogram, values.size, width))
    if entropy < 0.97 * width:
        zstd = _zstd_bits(sample, values.size)
        if zstd < 0.95 * plan.bits_needed:
            return Plan(Codec.ZSTD, zstd)
    return plan


def _map_for(histogram: npt.NDArray[np.int64], count: int, width: int) -> TokenMap:
    """Return the map of tokens for codes with this histogram."""
    # The most frequent code is the middle of what quantization gives; folding around it puts the rare codes last.
    centre = int(histogram.argmax())
    if width > MAX_DIRECT:
        return TokenMap(width, centre, folds=True, direct=5 if count < 1 << 14 else 7)
    folded = TokenMap(width, centre, folds=True)
    if count >= WORTH_ORDERING:
        return folded
    # Of codes in two heaps, such as those of kept values, the natural order makes the shorter table. It begins behind
    # the longest run of codes that do not occur, in a circle.
    present = histogram.nonzero()[0]
    gaps = np.diff(present, prepend=present[-1] - (1 << width))
    natural = TokenMap(width, int(present[int(gaps.argmax())]))
    codes: UnsignedArray = np.arange(1 << width, dtype=code_type(width))
    weights = np.log2(np.maximum(histogram, 0.4))
    roughness = []
    for tokens in (folded, natural):
        ordered = np.zeros(1 << width)
        ordered[tokens.tokens(codes)] = weights
        roughness.append(np.abs(ordered[1:] - ordered[:-1]).sum())
    return natural if roughness[1] < roughness[0] else folded


def plan_floats(patterns: UnsignedArray, exponent_bits: int) -> Plan:
    """Return how to code bit patterns of reals. The map of tokens is for patterns rotated left by one: exponent first,
    then mantissa, then sign."""
    width = 8 * patterns.itemsize
    if patterns.size * exponent_bits < 2 * WORTH_CODING:
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


def encode_codes(values: UnsignedArray, width: int, plan: Plan | None, memory: Memory) -> tuple[Codec, list[Part]]:
    """Return the codec and the bytes of codes: as `encode`, unless they go to a pool. Without a plan one is made where
    it is needed."""
    pooled = is_small(values.size, width)
    if plan is None and not pooled:
        plan = plan_codes(values, width)
    if memory.pooling and values.size and (pooled or (plan is not None and plan.bits_needed < POOLED_BITS)):
        memory.pools.setdefault(pool_of(values.size, width), []).append(values)
        return Codec.POOLED, []
    return encode(values, width, plan or plan_codes(values, width), memory)


def is_small(size: int, width: int) -> bool:
    """Return whether a stream of codes is pooled whatever they are, by this writer."""
    return size * width < POOLED_BITS // 2


def pool_of(size: int, width: int) -> tuple[int, int]:
    """Return which pool a stream belongs to: those of one width and, from 256 integers on, of one octave share one."""
    return width, max(size.bit_length(), 8)


def encode_pools(memory: Memory) -> list[Part]:
    """Return the streams that end a frame: one for each pool, in order."""
    parts: list[Part] = []
    for pool in sorted(memory.pools):
        values, width = np.concatenate(memory.pools[pool]), pool[0]
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
        memory.pools.setdefault(pool_of(count, width), []).append(codes)
        return codes
    return decode(reader, codec, count, width, code_type(width), memory)


def decode_pools(reader: Reader, memory: Memory) -> None:
    """Fill the arrays that `decode_codes` has promised to."""
    for pool in sorted(memory.pools):
        arrays, width = memory.pools[pool], pool[0]
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


_SAME_TABLE, _SAME_MAP, _COARSE = 1 << 3, 1 << 4, 1 << 7
_FOLDS, _HAS_RAW_BITS = 1 << 4, 1 << 5


def _entropy_encode(values: UnsignedArray, tokens: TokenMap, worth: int, memory: Memory) -> list[Part] | None:
    """Return the entropy-coded stream, or None where it takes `worth` bytes or more."""
    symbols = tokens.tokens(values)
    histogram = counts(symbols)
    table = ans.Table.of_counts(histogram[: int(histogram.nonzero()[0][-1]) + 1])
    last = memory.tables.get(tokens.width)
    first = table.rice_parameter << 5 | table.coarse * _COARSE
    header = bytearray()
    if last is not None and last[0] == tokens:
        first |= _SAME_MAP
    else:
        header.append(tokens.direct | tokens.folds * _FOLDS | bool(tokens.raw_bits) * _HAS_RAW_BITS)
        header += bytes((tokens.raw_bits,)) if tokens.raw_bits else b""
        header += varint(tokens.centre)
    header.append(table.num_tokens - 1)
    header += table.encode()
    cost = table.bits_for(histogram)
    raw_bits = int(histogram @ tokens.raw_widths.astype(np.int64))
    if last is not None and values.size < WORTH_SHARING:
        last_symbols = symbols if last[0] == tokens else last[0].tokens(values)
        last_histogram = counts(last_symbols)
        last_raw_bits = int(last_histogram @ last[0].raw_widths.astype(np.int64))
        last_cost = last[1].bits_for(last_histogram)
        if last_cost + last_raw_bits <= cost + raw_bits + 8 * len(header):
            (tokens, table), symbols = last, last_symbols
            cost, raw_bits, first, header = last_cost, last_raw_bits, _SAME_TABLE, bytearray()
    lanes_log2 = ans.lanes_for(cost) if table.num_tokens > 1 else 0
    header.insert(0, first | lanes_log2)
    if len(header) + (cost + raw_bits) / 8 >= worth:
        return None
    parts: list[Part] = [bytes(header)]
    if table.num_tokens > 1:
        states, words = ans.encode(symbols, table, lanes_log2, cost)
        parts += [bits.as_bytes(states).data, bits.as_bytes(words).data]
    if raw_bits:
        parts.append(tokens.raw(values, symbols, raw_bits).data)
    if sum(map(len, parts)) >= worth:
        return None
    memory.tables[tokens.width] = tokens, table
    return parts


def _entropy_decode(reader: Reader, count: int, width: int, dtype: npt.DTypeLike, memory: Memory) -> UnsignedArray:
    first = reader.byte()
    lanes_log2 = first & 7
    if first & (_SAME_TABLE | _SAME_MAP) and width not in memory.tables:
        raise NothingToRepeat(f"a stream repeats the map of one of {width} bits, and there is none")
    if first & _SAME_TABLE and first >> 4:
        raise ParameterOutOfRange("a stream that repeats a table describes another")
    if not first & _SAME_TABLE:
        tokens = memory.tables[width][0] if first & _SAME_MAP else _read_map(reader, width)
        num_tokens = reader.byte() + 1
        if num_tokens > tokens.max_tokens:
            raise LevelOutOfRange(f"a stream has {num_tokens} tokens where {tokens.max_tokens} suffice")
        table = ans.Table.decode(reader, num_tokens, first >> 5 & 3, bool(first & _COARSE))
        memory.tables[width] = tokens, table
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


def _read_map(reader: Reader, width: int) -> TokenMap:
    form = reader.byte()
    raw_bits = reader.byte() if form & _HAS_RAW_BITS else 0
    centre = reader.varint()
    direct = form & 15
    if form >> 6 or not MIN_DIRECT <= direct <= MAX_DIRECT or raw_bits >= width or centre >> width:
        raise ParameterOutOfRange("an entropy-coded stream has a map of tokens that cannot be")
    return TokenMap(width, centre, bool(form & _FOLDS), raw_bits, direct)


def _zstd_decode(reader: Reader, count: int, width: int, dtype: npt.DTypeLike) -> UnsignedArray:
    data = reader.take(reader.varint())
    size = count * np.dtype(dtype).itemsize
    try:
        frame = zstandard.get_frame_parameters(data)
        if frame.content_size != size:
            raise DecompressionBomb(
                f"a compressed section announces {frame.content_size} bytes where its layer has {size}"
            )
        if frame.window_size > MAX_WINDOW:
            raise MalformedCompression(f"a compressed section asks for a window of {frame.window_size} bytes")
        plain = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedCompression(f"a compressed section cannot be decompressed: {error}") from error
    if len(plain) != size:
        raise MalformedCompression("a compressed section does not hold what it announces")
    out: UnsignedArray = np.empty(count, dtype)
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
    return 8 * (7 + 0.3 * num_tokens)


def _zstd_bits(sample: UnsignedArray, count: int) -> float:
    """Return about how many bits zstd needs for `count` elements; infinite where there are too few to ask."""
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
