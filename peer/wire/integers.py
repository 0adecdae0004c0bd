"""A stream of n integers of w bits each, in spans, in one of three codecs: packed, entropy-coded, zstd.

Levels, residues, gaps between indices and the bit patterns of real numbers all travel as such streams. `plans` decides
which codec; `pools` joins the streams of several layers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from peer import native
from peer.wire import ans, bits
from peer.wire.bits import ByteArray, IntegerArray, UnsignedArray, pointer
from peer.wire.errors import (
    DecompressionBomb,
    LevelOutOfRange,
    MalformedCompression,
    ParameterOutOfRange,
    UnknownCodec,
)
from peer.wire.plans import ZSTD_LEVEL, Codec, CodingPlan
from peer.wire.reader import Reader, varint
from peer.wire.rice import pointer64
from peer.wire.tokens import MAX_DIRECT, MIN_DIRECT, TokenMap, counts

MAX_WINDOW = 8 << 20
"""RFC 8878 recommends that decoders support at least this window; frames that need more are refused."""

Part: TypeAlias = bytes | memoryview


def encode(
    values: UnsignedArray, width: int, plan: CodingPlan, sizes: IntegerArray | None = None
) -> tuple[Codec, list[Part]]:
    """Return the codec used and the bytes of `values: uint[n]`, all below 2**width, in spans of `sizes: int64[spans]`,
    or in one.

    If the planned codec turns out no shorter than packing, which a sample can hide, the stream is packed.
    """
    packed_size = bits.packed_size(values.size, width)
    parts: list[Part] | None = None
    if plan.codec is Codec.ENTROPY:
        parts = _entropy_encode(values, plan, packed_size, sizes)
    elif plan.codec is Codec.ZSTD:
        compressed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(bits.as_bytes(values).data)
        parts = [varint(len(compressed)), compressed]
        if sum(map(len, parts)) >= packed_size:
            parts = None
    if parts is None:
        return Codec.PACKED, [bits.pack(values, width).data]
    return plan.codec, parts


def decode(reader: Reader, codec: int, width: int, dtype: npt.DTypeLike, sizes: IntegerArray) -> UnsignedArray:
    """Return the integers of all spans one after another, `uint[n]` of `dtype`, all below 2**width.

    `sizes: int64[spans]`. Allocates a few bytes a number besides the result.
    """
    count = int(sizes.sum())
    if native.lib is not None:
        out: UnsignedArray = np.empty(count, dtype)
        ahead = reader.data[reader.position : reader.end]
        used = native.lib.wire_read_stream(
            pointer(ahead), len(ahead), codec, width, pointer64(sizes), sizes.size, count, pointer(out), out.itemsize
        )
        if used >= 0:
            reader.take(used)
            return out
    # The twin names the error.
    if codec == Codec.PACKED:
        return bits.unpack(reader.take(bits.packed_size(count, width)), count, width, dtype)
    if codec == Codec.ENTROPY:
        return _entropy_decode(reader, width, dtype, sizes, count)
    if codec == Codec.ZSTD:
        return _zstd_decode(reader, count, width, dtype)
    raise UnknownCodec(f"a stream of integers cannot have the codec {codec} here")


def one_span(size: int) -> IntegerArray:
    """Return the sizes of a stream that is not cut: int64[1]."""
    return np.array([size], np.int64)


def code_type(width: int) -> type[np.uint8] | type[np.uint16]:
    """Return the type that holds codes of that many bits."""
    return np.uint8 if width <= 8 else np.uint16


_SEVERAL, _UNUSED, _COARSE = 1 << 3, 1 << 4, 1 << 7
_FOLDS, _HAS_RAW_BITS = 1 << 4, 1 << 5


def _entropy_encode(
    values: UnsignedArray, plan: CodingPlan, worth: int, sizes: IntegerArray | None
) -> list[Part] | None:
    """Return the entropy-coded stream, or None if it takes `worth` bytes or more."""
    tokens = plan.tokens
    assert tokens is not None, "who plans entropy coding has found a map"
    spans = (
        ans.Spans.one(values.size)
        if plan.groups is None or sizes is None
        else ans.Spans(sizes, plan.groups, values.size)
    )
    if native.lib is not None:
        out = np.empty(worth, np.uint8)
        written = native.lib.wire_write_stream(
            pointer(values), values.itemsize, values.size, tokens.width, tokens.centre, tokens.folds, tokens.raw_bits,
            tokens.direct, native.pointer(plan.symbols, "uint8_t[]"), pointer64(spans.sizes), pointer(spans.tables),
            spans.sizes.size, pointer(out), worth,
        )  # fmt: skip
        if written < 0:
            raise MemoryError(f"no memory to code {values.size} integers")
        return [out[:written].data] if written else None
    symbols = tokens.tokens(values) if plan.symbols is None else plan.symbols
    own = ans.make_tables(symbols, spans)
    tables, cost, num_tables = own.tables, own.bits_needed, len(own.counts)
    raw_bits = int(own.counts.sum(axis=0) @ tokens.raw_widths.astype(np.int64)) if tokens.has_raw_bits else 0
    lanes_log2 = ans.lanes_for(cost) if tables.code_anything else 0
    header = bytearray((lanes_log2 | (num_tables > 1) * _SEVERAL | own.parameter << 5 | own.coarse * _COARSE,))
    header.append(tokens.direct | tokens.folds * _FOLDS | bool(tokens.raw_bits) * _HAS_RAW_BITS)
    header += bytes((tokens.raw_bits,)) if tokens.raw_bits else b""
    header += varint(tokens.centre)
    if num_tables > 1:
        header.append(num_tables - 1)
        header += bits.pack(spans.tables, (num_tables - 1).bit_length()).tobytes()
    header += tables.num_tokens.tobytes() + own.code
    if len(header) + (cost + raw_bits) / 8 >= worth:
        return None
    parts: list[Part] = [bytes(header)]
    if tables.code_anything:
        states, words = ans.encode(symbols, tables, spans, lanes_log2, cost)
        parts += [bits.as_bytes(states).data, bits.as_bytes(words).data]
    if raw_bits:
        parts.append(tokens.raw(values, symbols, raw_bits).data)
    return None if sum(map(len, parts)) >= worth else parts


def _entropy_decode(reader: Reader, width: int, dtype: npt.DTypeLike, sizes: IntegerArray, count: int) -> UnsignedArray:
    first = reader.byte()
    if first & _UNUSED:
        raise ParameterOutOfRange("an entropy-coded stream sets a bit that has no meaning")
    tokens = _read_map(reader, width)
    num_tables = 1
    which = np.zeros(sizes.size, np.uint8)
    if first & _SEVERAL:
        num_tables = reader.byte() + 1
        if not 2 <= num_tables <= ans.MAX_TABLES:
            raise ParameterOutOfRange(f"an entropy-coded stream of several tables cannot have {num_tables}")
        each = (num_tables - 1).bit_length()
        which = bits.unpack(reader.take(bits.packed_size(sizes.size, each)), sizes.size, each, np.uint8)
        if int(which.max(initial=0)) >= num_tables:
            raise ParameterOutOfRange("a span of an entropy-coded stream names a table that it does not have")
    num_tokens = bytes(reader.take(num_tables))
    if (most := max(num_tokens) + 1) > tokens.max_tokens:
        raise LevelOutOfRange(f"a stream has {most} tokens where {tokens.max_tokens} suffice")
    tables = ans.read_tables(reader, num_tokens, first >> 5 & 3, bool(first & _COARSE))
    spans = ans.Spans(sizes, which, count)
    # A code of up to eight bits without raw ones is its token's alone.
    direct = not tokens.has_raw_bits and np.dtype(dtype) == np.uint8
    alphabet = _alphabet(tokens) if direct else _ALL_TOKENS
    if most > 1:
        states = np.frombuffer(reader.take(4 << (first & 7)), "<u4").astype(np.uint32)
        symbols = ans.decode(states, reader, tables, spans, alphabet)
    else:
        symbols = np.full(count, alphabet[0])
    if direct:
        return symbols
    if not tokens.has_raw_bits:
        return tokens.values(symbols, memoryview(b""), dtype)
    raw_bits = int(counts(symbols) @ tokens.raw_widths.astype(np.int64))
    raw = reader.take((raw_bits + 7) // 8)
    bits.check_padding(raw, raw_bits)
    return tokens.values(symbols, raw, dtype)


_ALL_TOKENS = np.arange(256, dtype=np.uint8)


@lru_cache(maxsize=256)
def _alphabet(tokens: TokenMap) -> ByteArray:
    """Return the integer of up to eight bits that each token is: uint8[256]."""
    return tokens.values(_ALL_TOKENS, memoryview(b""), np.uint8).astype(np.uint8)


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
