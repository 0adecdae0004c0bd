"""From the sections and pools of a frame back to the layers of a message.

Sections come first and their pools last, so a section is read as a promise, and becomes a payload when everything has
been read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from peer.compress.magnitude import copied, max_magnitude
from peer.compress.payload import (
    Dense,
    FloatArray,
    LayerPayload,
    Levels,
    MoreBits,
    Residues,
    Rounding,
    Sparse,
    ValueType,
    WholeIntegers,
)
from peer.wire import indices, integers
from peer.wire.bits import IntegerArray, UnsignedArray
from peer.wire.errors import (
    IndexCountOutOfRange,
    MissingPrevious,
    NonFiniteValue,
    NothingToRepeat,
    ParameterOutOfRange,
    UnknownSection,
    WrongFloatType,
)
from peer.wire.integers import code_type, one_span
from peer.wire.plans import Codec
from peer.wire.reader import Reader, unzigzag
from peer.wire.sections import (
    CODEC,
    FORMATS,
    PREDICTED,
    SAME,
    SAME_THETA,
    PoolKey,
    Repeats,
    Tag,
    check_level_parameters,
    check_scaled,
    keep_low_bits,
    predicts,
    rotated,
)


class Ledger:
    """Account of one layer's bytes, for who measures frames; nobody else pays for it."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}
        self.codecs: list[str] = []
        self._position = 0

    def begin(self, reader: Reader) -> None:
        self._position = reader.position

    def book(self, reader: Reader, account: str, codec: str | None = None) -> None:
        """Book the bytes read since the last call."""
        self.spent[account] = self.spent.get(account, 0) + reader.position - self._position
        self._position = reader.position
        if codec is not None:
            self.codecs.append(codec)


def decode(
    reader: Reader,
    layers: Iterable[tuple[int, LayerPayload | None]],
    *,
    tags: frozenset[Tag],
    wide: bool,
    single: bool,
    ledgers: list[Ledger] | None = None,
) -> tuple[LayerPayload, ...]:
    """Return the payloads of the layers whose sizes are given, each with the sender's earlier payload or None.

    `tags`: the kinds of payload that the message can hold. `single`: refuse float64 values. `ledgers` receives one for
    each layer, and one for the pools.
    """
    return _Reader(reader, wide, single, tags, ledgers).decode(layers)


Found = dict[PoolKey, np.ndarray]
Promise = Callable[[], LayerPayload]
Source = UnsignedArray | tuple[PoolKey, int, int]
"""Integers, or their place in a pool that is read later."""


class _Reader:
    """One frame being read."""

    def __init__(
        self, reader: Reader, wide: bool, single: bool, tags: frozenset[Tag], ledgers: list[Ledger] | None
    ) -> None:
        self._reader = reader
        self._repeats = Repeats(wide)
        self._single = single
        self._tags = tags
        self._ledgers = ledgers
        self._ledger: Ledger | None = None
        self._where: indices.Reading = {}
        self._indices: dict[int, list[IntegerArray]] = {}
        self._spans: dict[PoolKey, list[int]] = {}
        self._pooled: dict[PoolKey, int] = {}
        self._found: Found = {}

    def decode(self, layers: Iterable[tuple[int, LayerPayload | None]]) -> tuple[LayerPayload, ...]:
        promises = [self._section(size, previous) for size, previous in layers]
        self._begin_ledger()
        self._indices = indices.decode_rest(self._reader, self._where)
        self._book("indices")
        for key in sorted(self._spans):
            self._found[key] = self._pool(key, np.array(self._spans[key], np.int64))
        self._book("values")
        return tuple([promise() for promise in promises])

    def _section(self, size: int, previous: LayerPayload | None) -> Promise:
        if self._ledgers is not None:
            self._begin_ledger()
        tag = self._reader.byte()
        kind = tag & 7
        if kind not in self._tags and kind <= Tag.WHOLE_INTEGERS:
            raise UnknownSection(f"a message of this kind cannot hold {Tag(kind).name.lower()}")
        if kind == Tag.SPARSE:
            return self._sparse(tag >> 3, size)
        if kind in (Tag.DENSE, Tag.LEVELS):
            return self._values(tag, size)
        if kind == Tag.RESIDUES:
            return self._residues(tag, size, previous)
        if kind == Tag.MORE_BITS and not tag & (SAME_THETA | PREDICTED):
            return self._more_bits(tag, size)
        if kind == Tag.WHOLE_INTEGERS and not tag & (SAME | SAME_THETA | PREDICTED):
            return self._whole_integers(tag >> CODEC, size)
        raise UnknownSection(f"a section has the unknown tag {tag:#04x}")

    def _sparse(self, code: int, size: int) -> Promise:
        reader = self._reader
        count = reader.varint()
        if count > size:
            raise IndexCountOutOfRange(f"a sparse layer of {size} numbers claims {count} entries")
        self._book("header")
        where = indices.decode(reader, code, count, size, self._where)
        if self._ledger is not None:
            self._ledger.book(reader, "indices", indices.name(code))
        values = self._values(reader.byte(), count)

        def promise() -> LayerPayload:
            held = self._indices[where[0]][where[1]] if isinstance(where, tuple) else where
            return Sparse(size, held, values())

        return promise

    def _values(self, tag: int, size: int) -> Callable[[], Dense | Levels]:
        reader, repeats = self._reader, self._repeats
        codec = tag >> CODEC
        if tag & 7 == Tag.DENSE and not tag & PREDICTED:
            return self._dense(ValueType(tag >> 3 & 3), codec, size)
        if tag & 7 != Tag.LEVELS or tag & (SAME_THETA | PREDICTED):
            raise UnknownSection(f"the values of a layer have the unknown tag {tag:#04x}")
        if tag & SAME:
            if repeats.levels is None:
                raise NothingToRepeat("a section repeats the parameters of levels that no section gave")
        else:
            width = reader.byte() + 1
            parameters = (reader.varint(), unzigzag(reader.varint()), reader.varint(), width)
            check_level_parameters(*parameters, ParameterOutOfRange)
            repeats.levels = parameters
        levels = repeats.levels
        self._book("header")
        scale = self._scalar()
        check_scaled(scale, levels, repeats.wide, NonFiniteValue)
        self._book("scales")
        codes = self._codes(codec, size, levels[3])
        return lambda: Levels(scale, *levels, self._held(codes))

    def _dense(self, value_type: ValueType, codec: int, size: int) -> Callable[[], Dense]:
        if self._single and value_type is ValueType.FLOAT64:
            raise WrongFloatType("a layer holds float64 values where this run computes in float32")
        self._book("header")
        if codec == Codec.POOLED:
            key, start, end = self._promised((False, value_type), size)
            self._book("values", codec)
            return lambda: Dense(self._found[key][start:end], value_type)
        values, magnitude = decode_reals(self._reader, codec, value_type, one_span(size))
        self._book("values", codec)
        return lambda: Dense.reaching(values, value_type, magnitude)

    def _residues(self, tag: int, size: int, previous: LayerPayload | None) -> Promise:
        reader, repeats = self._reader, self._repeats
        if tag & SAME:
            if repeats.residues is None:
                raise NothingToRepeat("a section repeats the parameters of residues that no section gave")
        else:
            byte = reader.byte()
            if byte >> 7 or byte >> 4 & 3 > Rounding.DITHER:
                raise ParameterOutOfRange("residues have an unknown rounding")
            repeats.residues = (byte & 15) + 1, Rounding(byte >> 4 & 3), bool(byte & 64)
        width, rounding, has_check = repeats.residues
        self._book("header")
        if tag & SAME_THETA:
            if repeats.theta is None:
                raise NothingToRepeat("a section repeats a θ that no section gave")
        else:
            theta = self._scalar()
            check_scaled(theta, None, repeats.wide, NonFiniteValue)
            repeats.theta = theta
        theta = repeats.theta
        self._book("scales")
        check = reader.word64() if has_check else None
        self._book("checks")
        codes = self._codes(tag >> CODEC, size, width)
        if not tag & PREDICTED:
            return lambda: Residues(theta, width, rounding, self._held(codes), check)
        if not isinstance(previous, Residues) or not predicts(previous, width, size):
            raise MissingPrevious("residues are coded against earlier ones that this receiver does not hold")
        earlier = previous.residues

        def promise() -> LayerPayload:
            held = self._held(codes)
            held += earlier
            keep_low_bits(held, width)
            return Residues(theta, width, rounding, held, check)

        return promise

    def _more_bits(self, tag: int, size: int) -> Promise:
        reader, repeats = self._reader, self._repeats
        if tag & SAME:
            if repeats.more_bits is None:
                raise NothingToRepeat("a section repeats the parameters of a repair that no section gave")
        else:
            low, width = reader.byte(), reader.byte() + 1
            if width > 16 or low + width > 64:
                raise ParameterOutOfRange(f"a repair cannot hold {width} bits from bit {low} on")
            repeats.more_bits = low, width
        low, width = repeats.more_bits
        self._book("header")
        codes = self._codes(tag >> CODEC, size, width)
        return lambda: MoreBits(low, width, self._held(codes))

    def _whole_integers(self, codec: int, size: int) -> Promise:
        width = self._reader.byte() + 1
        if width > 64:
            raise ParameterOutOfRange(f"integers cannot have {width} bits")
        self._book("header")
        folded = integers.decode(self._reader, codec, width, np.uint64, one_span(size))
        self._book("values", codec)
        whole = (folded >> np.uint64(1)).view(np.int64)
        whole ^= -(folded & np.uint64(1)).view(np.int64)
        return lambda: WholeIntegers(whole)

    def _codes(self, codec: int, size: int, width: int) -> Source:
        if codec == Codec.POOLED:
            codes: Source = self._promised((True, width), size)
        else:
            codes = integers.decode(self._reader, codec, width, code_type(width), one_span(size))
        if self._ledger is not None:
            self._book("values", codec)
        return codes

    def _promised(self, key: PoolKey, size: int) -> tuple[PoolKey, int, int]:
        start = self._pooled.get(key, 0)
        self._pooled[key] = start + size
        self._spans.setdefault(key, []).append(size)
        return key, start, start + size

    def _held(self, codes: Source) -> UnsignedArray:
        if isinstance(codes, tuple):
            key, start, end = codes
            return self._found[key][start:end]
        return codes

    def _pool(self, key: PoolKey, sizes: IntegerArray) -> np.ndarray:
        codec = self._reader.byte()
        is_codes, which = key
        if is_codes:
            return integers.decode(self._reader, codec, which, code_type(which), sizes)
        return decode_reals(self._reader, codec, ValueType(which), sizes)[0]

    def _scalar(self) -> float:
        return self._reader.float64() if self._repeats.wide else self._reader.float32()

    def _begin_ledger(self) -> None:
        if self._ledgers is not None:
            self._ledger = Ledger()
            self._ledger.begin(self._reader)
            self._ledgers.append(self._ledger)

    def _book(self, account: str, codec: int | None = None) -> None:
        if self._ledger is not None:
            self._ledger.book(self._reader, account, None if codec is None else Codec(codec).name.lower())


_HELD_AS: dict[ValueType, type[np.float32] | type[np.float64]] = {
    ValueType.FLOAT32: np.float32,
    ValueType.FLOAT64: np.float64,
}
"""Value types whose packed form is also the form in memory."""


def decode_reals(reader: Reader, codec: int, value_type: ValueType, sizes: IntegerArray) -> tuple[FloatArray, float]:
    """Return the reals of a stream, float64 or float32, in spans of `sizes`, and their largest magnitude. Raises
    `NonFiniteValue` among others."""
    width, _, dtype = FORMATS[value_type]
    if codec == Codec.PACKED and value_type in _HELD_AS:
        values, magnitude = copied(reader.take(int(sizes.sum()) * width // 8), _HELD_AS[value_type])
        _check_magnitude(magnitude)
        return values, magnitude
    patterns = integers.decode(reader, codec, width, dtype, sizes)
    return reals_of(rotated(patterns, width - 1) if codec == Codec.ENTROPY else patterns, value_type)


def reals_of(patterns: UnsignedArray, value_type: ValueType) -> tuple[FloatArray, float]:
    """Return the reals with these bit patterns, and their largest magnitude. Raises `NonFiniteValue`."""
    values: FloatArray
    if value_type is ValueType.FLOAT64:
        values = patterns.view(np.float64)
    elif value_type is ValueType.FLOAT32:
        values = patterns.view(np.float32)
    elif value_type is ValueType.BFLOAT16:
        whole = patterns.astype(np.uint32)
        whole <<= np.uint32(16)
        values = whole.view(np.float32)
    else:
        values = patterns.view(np.float16).astype(np.float32)
    magnitude = max_magnitude(values)
    _check_magnitude(magnitude)
    return values, magnitude


def _check_magnitude(magnitude: float) -> None:
    """Raise `NonFiniteValue` unless the largest magnitude of a layer is finite."""
    if not math.isfinite(magnitude):
        raise NonFiniteValue("a layer holds an infinite value or one that is not a number")
