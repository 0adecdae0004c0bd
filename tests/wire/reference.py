"""A second reader of the format, written from the docstring of `peer.wire` and from nothing else.

Slow and plain: Python integers, one bit at a time. It shares no code with the package but the types it returns, so that
where both read a frame alike, the description says what the code does.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zstandard

from peer.compress.layout import Layout
from peer.compress.payload import (
    Dense,
    LayerPayload,
    Levels,
    MoreBits,
    Residues,
    Rounding,
    Sparse,
    ValueType,
    WholeIntegers,
)
from peer.wire import Message, MessageKind, RepairWish

FLOATS = {0: (64, "<u8", "<f8"), 1: (32, "<u4", "<f4"), 2: (16, "<u2", None), 3: (16, "<u2", "<f2")}


@dataclass
class Cursor:
    data: bytes
    at: int = 0

    def bytes(self, count: int) -> bytes:
        assert self.at + count <= len(self.data)
        self.at += count
        return self.data[self.at - count : self.at]

    def integer(self, count: int) -> int:
        return int.from_bytes(self.bytes(count), "little")

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.integer(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def weight(self) -> float:
        form = self.varint()
        if form == 0:
            return 0.0
        if form == 1:
            return float(struct.unpack("<d", self.bytes(8))[0])
        return 1.0 / (form - 1)

    def bit_string(self) -> BitCursor:
        return BitCursor(self)


class BitCursor:
    """Reads bits, taking bytes as they are needed."""

    def __init__(self, source: Cursor) -> None:
        self.source, self.bits, self.count = source, 0, 0

    def integer(self, width: int) -> int:
        while self.count < width:
            self.bits |= self.source.integer(1) << self.count
            self.count += 8
        value = self.bits & ((1 << width) - 1)
        self.bits >>= width
        self.count -= width
        return value

    def end(self) -> None:
        assert self.bits == 0, "padding"


def unzigzag(value: int) -> int:
    return -((value + 1) // 2) if value % 2 else value // 2


def rice(source: Cursor, count: int, parameter: int) -> list[int]:
    string = source.bit_string()
    high = []
    for _ in range(count):
        zeros = 0
        while string.integer(1) == 0:
            zeros += 1
        high.append(zeros)
    values = [zeros * 2**parameter + string.integer(parameter) for zeros in high]
    string.end()
    return values


@dataclass
class Shared:
    """What sections of one frame repeat or pool."""

    wide: bool
    levels: Any = None
    residues: Any = None
    theta: float = 0.0
    more_bits: Any = None
    fixed_gaps: list[tuple[np.ndarray, int, int]] = field(default_factory=list)
    streamed_gaps: list[tuple[np.ndarray, int]] = field(default_factory=list)
    dense_pools: dict[int, list[np.ndarray]] = field(default_factory=dict)
    code_pools: dict[int, list[np.ndarray]] = field(default_factory=dict)
    changes: list[tuple[np.ndarray, np.ndarray, int]] = field(default_factory=list)


def stream(source: Cursor, codec: int, spans: list[int], width: int, size: int) -> list[int]:
    """Return the integers of all spans; `size` is the number of bytes of each under zstd."""
    count = sum(spans)
    if codec == 0:
        string = source.bit_string()
        values = [string.integer(width) for _ in range(count)]
        string.end()
        return values
    if codec == 2:
        plain = zstandard.ZstdDecompressor().decompress(source.bytes(source.varint()))
        return [int.from_bytes(plain[i * size : (i + 1) * size], "little") for i in range(count)]
    assert codec == 1
    first = source.integer(1)
    form = source.integer(1)
    e, folds = form & 15, bool(form & 16)
    r = source.integer(1) if form & 32 else 0
    centre = source.varint()
    num_tables, which = 1, [0] * len(spans)
    if first & 8:
        num_tables = source.integer(1) + 1
        string = source.bit_string()
        which = [string.integer((num_tables - 1).bit_length()) for _ in spans]
        string.end()
    sizes = [source.integer(1) + 1 for _ in range(num_tables)]
    steps = rice(source, sum(m for m in sizes if m > 1), first >> 5 & 3)
    tables = [table(m, [steps.pop(0) for _ in range(m)] if m > 1 else [], bool(first & 128)) for m in sizes]
    lanes = 1 << (first & 7)
    states = [source.integer(4) for _ in range(lanes)] if max(sizes) > 1 else []
    tokens = []
    for span, number in zip(spans, which, strict=True):
        bounds = tables[number]
        for _ in range(span):
            if not states:
                tokens.append(0)
                continue
            lane = len(tokens) % lanes
            slot = states[lane] % 2**14
            token = next(t for t in range(len(bounds) - 1) if bounds[t] <= slot < bounds[t + 1])
            x = (bounds[token + 1] - bounds[token]) * (states[lane] // 2**14) + slot - bounds[token]
            states[lane] = x if x >= 2**16 else x * 2**16 + source.integer(2)
            tokens.append(token)
    assert all(x == 2**16 for x in states)
    string = source.bit_string()
    values = []
    for token in tokens:
        if token < 2**e:
            base, raw = token, r
        else:
            octave, quarter = divmod(token - 2**e, 4)
            base, raw = (4 + quarter) * 2 ** (octave + e - 2), r + octave + e - 2
        z = base * 2**r + string.integer(raw)
        values.append(((unzigzag(z) if folds else z) + centre) % 2**width)
    string.end()
    return values


def table(m: int, steps: list[int], coarse: bool) -> list[int]:
    """Return the first slot of every token, and 2**14."""
    if m == 1:
        return [0, 2**14]
    q = 15 if coarse else 60
    weights = []
    for step in steps:
        q += unzigzag(step)
        fine = 4 * q if coarse else q
        weights.append((4 + fine % 4) * 2 ** (fine // 4))
    sums = [sum(weights[:i]) for i in range(m + 1)]
    return [c * (2**14 - m) // sums[-1] + i for i, c in enumerate(sums)]


def codes(source: Cursor, codec: int, count: int, width: int, shared: Shared) -> np.ndarray:
    dtype = np.uint8 if width <= 8 else np.uint16
    if codec == 3:
        promised = np.zeros(count, dtype)
        shared.code_pools.setdefault(width, []).append(promised)
        return promised
    return np.array(stream(source, codec, [count], width, np.dtype(dtype).itemsize), dtype)


def reals(patterns: list[int], codec: int, value_type: int) -> np.ndarray:
    width, pattern_type, float_type = FLOATS[value_type]
    if codec == 1:
        patterns = [(p >> 1) | (p & 1) << (width - 1) for p in patterns]
    raw = np.array(patterns, pattern_type)
    if float_type is None:
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view(float_type) if value_type == 0 else raw.view(float_type).astype(np.float32)


def scalar(source: Cursor, shared: Shared) -> float:
    return float(struct.unpack("<d", source.bytes(8))[0] if shared.wide else struct.unpack("<f", source.bytes(4))[0])


def values_of(source: Cursor, tag: int, n: int, shared: Shared) -> Dense | Levels:
    codec = tag >> 6
    if tag & 7 == 0:
        value_type = ValueType(tag >> 3 & 3)
        if codec == 3:
            promised = np.zeros(n, np.float64 if value_type == 0 else np.float32)
            shared.dense_pools.setdefault(value_type, []).append(promised)
            return Dense(promised, value_type)
        width = FLOATS[value_type][0]
        return Dense(reals(stream(source, codec, [n], width, width // 8), codec, value_type), value_type)
    assert tag & 7 == 1
    if not tag & 8:
        bits = source.integer(1) + 1
        shared.levels = (source.varint(), unzigzag(source.varint()), source.varint(), bits)
    divisor, base, step, bits = shared.levels
    scale = scalar(source, shared)
    return Levels(scale, divisor, base, step, bits, codes(source, codec, n, bits, shared))


def section(source: Cursor, n: int, shared: Shared, earlier: LayerPayload | None) -> LayerPayload:
    tag = source.integer(1)
    kind, codec = tag & 7, tag >> 6
    if kind < 2:
        return values_of(source, tag, n, shared)
    if kind == 2:
        code, k = tag >> 3, source.varint()
        where = np.zeros(k, np.int64)
        if code <= 28:
            where[:] = np.cumsum(np.array(rice(source, k, code), np.int64) + 1) - 1
        elif code == 29:
            shared.fixed_gaps.append((where, n, k))
        elif code == 30:
            shared.streamed_gaps.append((where, n))
        else:
            where[:] = range(n)
        return Sparse(n, where, values_of(source, source.integer(1), k, shared))
    if kind == 3:
        if not tag & 8:
            form = source.integer(1)
            shared.residues = (form & 15) + 1, Rounding(form >> 4 & 3), bool(form & 64)
        bits, rounding, checked = shared.residues
        if not tag & 16:
            shared.theta = scalar(source, shared)
        check = source.integer(8) if checked else None
        found = codes(source, codec, n, bits, shared)
        if tag & 32:
            assert isinstance(earlier, Residues)
            shared.changes.append((found, earlier.residues, bits))
        return Residues(shared.theta, bits, rounding, found, check)
    if kind == 4:
        if not tag & 8:
            shared.more_bits = source.integer(1), source.integer(1) + 1
        low, bits = shared.more_bits
        return MoreBits(low, bits, codes(source, codec, n, bits, shared))
    assert kind == 5
    width = source.integer(1) + 1
    return WholeIntegers(np.array([unzigzag(v) for v in stream(source, codec, [n], width, 8)], np.int64))


def decode(frame: bytes, layout: Layout, previous: Message | None = None) -> Message:
    assert zlib.crc32(frame[:-4]) == int.from_bytes(frame[-4:], "little")
    source = Cursor(frame[:-4])
    assert source.bytes(3) == b"SV\x01"
    flags = source.integer(1)
    kind, shared = MessageKind(flags & 15), Shared(bool(flags & 16))
    sender, round_, phase = source.varint(), source.varint(), source.varint()
    weights = source.weight(), source.weight()
    if flags & 32:
        assert previous is not None
        assert (previous.round, previous.phase) == (source.varint(), source.varint())
    count, last, ids = source.varint(), -1, []
    if kind in (MessageKind.REPAIR_REQUEST, MessageKind.REPAIR):
        for _ in range(count):
            last += source.varint() + 1
            ids.append(last)
    wanted = ()
    numbers = ids if kind is MessageKind.REPAIR else range(count)
    if kind is MessageKind.REPAIR_REQUEST:
        wanted = tuple(RepairWish(i, source.integer(1), source.integer(1)) for i in ids)
        numbers = ()
    sizes = [source.varint() for _ in range(count)] if kind is MessageKind.PART else layout.sizes
    layers = []
    for number in numbers:
        earlier = previous.layers[number] if flags & 32 and previous is not None else None
        layers.append(section(source, sizes[number], shared, earlier))
    if shared.fixed_gaps:
        string = source.bit_string()
        for where, n, k in shared.fixed_gaps:
            gaps = [string.integer((n - k).bit_length()) for _ in range(k)]
            where[:] = np.cumsum(np.array(gaps, np.int64) + 1) - 1
        string.end()
    if shared.streamed_gaps:
        largest = max(n for _, n in shared.streamed_gaps)
        members = [where for where, _ in shared.streamed_gaps]
        fill(members, stream(source, 1, [member.size for member in members], largest.bit_length(), 8))
        for member in members:
            member[:] = np.cumsum(member + 1) - 1
    for value_type, members in sorted(shared.dense_pools.items()):
        codec, width = source.integer(1), FLOATS[value_type][0]
        patterns = stream(source, codec, [member.size for member in members], width, width // 8)
        fill(members, reals(patterns, codec, value_type))
    for width, members in sorted(shared.code_pools.items()):
        spans = [member.size for member in members]
        fill(members, stream(source, source.integer(1), spans, width, members[0].itemsize))
    for changed, before, bits in shared.changes:
        changed[:] = (changed.astype(np.int64) + before) % 2**bits
    assert source.at == len(source.data)
    layer_ids = tuple(ids) if kind is MessageKind.REPAIR else None
    return Message(kind, sender, round_, phase, *weights, tuple(layers), layer_ids, wanted)


def fill(members: list[np.ndarray], values: Any) -> None:
    """Hand out the values of a pool to its members."""
    start = 0
    for member in members:
        member[:] = values[start : start + member.size]
        start += member.size
