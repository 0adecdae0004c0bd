"""The layers of a frame: each payload to a section of bytes and back.

A section begins with a tag whose lowest three bits name the payload and whose upper bits depend on it. Parameters that
repeat those of the section before (of the same kind of payload) cost one bit; `Repeats` holds them.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
    num_values,
)
from peer.errors import LocalProtocolError
from peer.wire import indices, integers
from peer.wire.bits import CHUNK, UnsignedArray
from peer.wire.errors import (
    IndexCountOutOfRange,
    LevelOutOfRange,
    MissingPrevious,
    NonFiniteValue,
    NothingToRepeat,
    ParameterOutOfRange,
    UnknownSection,
    WrongFloatType,
)
from peer.wire.integers import Codec, Part
from peer.wire.reader import Reader, unzigzag, varint, zigzag

EXACT = 2**53
"""Integers up to here are exact in float64; levels stay within."""

_FORMATS: dict[ValueType, tuple[int, int, type[np.unsignedinteger[Any]]]] = {
    ValueType.FLOAT64: (64, 11, np.uint64),
    ValueType.FLOAT32: (32, 8, np.uint32),
    ValueType.BFLOAT16: (16, 8, np.uint16),
    ValueType.FLOAT16: (16, 5, np.uint16),
}
"""Bits, exponent bits, and the type that holds a bit pattern."""

_GREATEST = {False: float(np.finfo(np.float32).max), True: float(np.finfo(np.float64).max)}


class Tag(enum.IntEnum):
    """The kind of payload that a section holds."""

    DENSE = 0
    LEVELS = 1
    SPARSE = 2
    RESIDUES = 3
    MORE_BITS = 4
    WHOLE_INTEGERS = 5


_SAME = 1 << 3
_SAME_THETA = 1 << 4
_PREDICTED = 1 << 5
_CODEC = 6


class Ledger:
    """Where the bytes of one layer went; `describe` hands one in, nobody else pays for it."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}
        self.codecs: list[str] = []
        self._position = 0

    def begin(self, reader: Reader) -> None:
        self._position = reader.position

    def book(self, reader: Reader, account: str, codec: str | None = None) -> None:
        """Book what was read since the last call."""
        self.spent[account] = self.spent.get(account, 0) + reader.position - self._position
        self._position = reader.position
        if codec is not None:
            self.codecs.append(codec)


@dataclass
class Repeats:
    """The parameters that a section may repeat, and how scalars travel in this frame."""

    wide: bool
    """Whether scales and θ are float64."""
    levels: tuple[int, int, int, int] | None = None
    """divisor, base, step, bits"""
    residues: tuple[int, Rounding, bool] | None = None
    """bits, rounding, whether there is a check"""
    theta: float | None = None
    more_bits: tuple[int, int] | None = None
    """low, bits"""
    changes: list[tuple[UnsignedArray, UnsignedArray, int]] = field(default_factory=list)
    """Codes that `finish` has to add earlier ones to, those, and their bits."""
    streams: integers.Memory = field(default_factory=integers.Memory)


# --- encoding ---------------------------------------------------------------------------------------------------------


def encode(payload: LayerPayload, size: int, repeats: Repeats, previous: LayerPayload | None) -> list[Part]:
    """Return the section of one layer of `size` numbers. `previous` is the sender's earlier payload of this layer, or
    None. Raises `LocalProtocolError` for a payload that no section can hold."""
    if num_values(payload) != size:
        raise LocalProtocolError(f"a payload of {num_values(payload)} numbers was given for a layer of {size}")
    if isinstance(payload, Sparse):
        return _encode_sparse(payload, repeats)
    if isinstance(payload, (Dense, Levels)):
        return _encode_values(payload, repeats)
    if isinstance(payload, Residues):
        return _encode_residues(payload, repeats, previous)
    if isinstance(payload, MoreBits):
        return _encode_more_bits(payload, repeats)
    return _encode_whole_integers(payload, repeats)


def encode_pools(repeats: Repeats) -> list[Part]:
    """Return what follows the last section: what the sections have pooled."""
    return indices.encode_pool(repeats.streams) + integers.encode_pools(repeats.streams)


def is_predicted(section: list[Part]) -> bool:
    """Return whether decoding the section takes an earlier message."""
    tag = section[0][0]
    return bool(tag & 7 == Tag.RESIDUES and tag & _PREDICTED)


def needs_double(layers: Sequence[LayerPayload]) -> bool:
    """Return whether a scale or θ is not a float32 exactly, so that all of the frame's are sent as float64."""
    for layer in layers:
        inner = layer.values if isinstance(layer, Sparse) else layer
        if isinstance(inner, Levels) and not _fits_single(inner.scale):
            return True
        if isinstance(inner, Residues) and not _fits_single(inner.theta):
            return True
    return False


def _fits_single(value: float) -> bool:
    try:
        return bool(struct.unpack("<f", struct.pack("<f", value))[0] == value)
    except OverflowError:
        return False


def _encode_values(payload: Dense | Levels, repeats: Repeats) -> list[Part]:
    if isinstance(payload, Dense):
        return _encode_dense(payload, repeats)
    parameters = (payload.divisor, payload.base, payload.step, payload.bits)
    _check_level_parameters(*parameters, LocalProtocolError)
    _check_scaled(payload.scale, parameters, repeats.wide, LocalProtocolError)
    _check_codes(payload.codes, payload.bits)
    codec, parts = integers.encode_codes(payload.codes, payload.bits, None, repeats.streams)
    head = bytearray((Tag.LEVELS | codec << _CODEC,))
    if parameters == repeats.levels:
        head[0] |= _SAME
    else:
        head.append(payload.bits - 1)
        head += varint(payload.divisor) + varint(zigzag(payload.base)) + varint(payload.step)
        repeats.levels = parameters
    head += _scalar(payload.scale, repeats.wide)
    return [bytes(head), *parts]


def _encode_dense(payload: Dense, repeats: Repeats) -> list[Part]:
    width, exponent_bits, _ = _FORMATS[payload.value_type]
    patterns = _patterns_of(payload)
    codec, parts = _encode_patterns(patterns, width, exponent_bits, repeats.streams)
    return [bytes((Tag.DENSE | payload.value_type << 3 | codec << _CODEC,)), *parts]


def _encode_patterns(
    patterns: UnsignedArray, width: int, exponent_bits: int, memory: integers.Memory
) -> tuple[Codec, list[Part]]:
    plan = integers.plan_floats(patterns, exponent_bits)
    if plan.codec is Codec.ENTROPY:
        codec, parts = integers.encode(_rotated(patterns, 1), width, plan, memory)
        if codec is Codec.ENTROPY:
            return codec, parts
        plan = integers.packed_plan(patterns.size, width)
    return integers.encode(patterns, width, plan, memory)


def _patterns_of(payload: Dense) -> UnsignedArray:
    """Return the bit patterns of finite values. Raises `LocalProtocolError` where the value type would lose any."""
    values, value_type = np.ascontiguousarray(payload.values), payload.value_type
    if values.dtype != (np.float64 if value_type is ValueType.FLOAT64 else np.float32):
        raise LocalProtocolError(f"{value_type.name} values are held as {values.dtype}")
    _check_finite(values, LocalProtocolError)
    patterns: UnsignedArray
    if value_type is ValueType.FLOAT64:
        return values.view(np.uint64)
    if value_type is ValueType.FLOAT32:
        return values.view(np.uint32)
    if value_type is ValueType.BFLOAT16:
        whole = values.view(np.uint32)
        patterns = (whole >> np.uint32(16)).astype(np.uint16)
        exact = not np.any(whole & np.uint32(0xFFFF))
    else:
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        patterns = half.view(np.uint16)
        exact = bool(np.array_equal(half.astype(np.float32).view(np.uint32), values.view(np.uint32)))
    if not exact:
        raise LocalProtocolError(f"a value is not a {value_type.name} exactly")
    return patterns


def _encode_sparse(payload: Sparse, repeats: Repeats) -> list[Part]:
    where = np.ascontiguousarray(payload.indices)
    if where.dtype != np.int64 or num_values(payload.values) != where.size:
        raise LocalProtocolError("a sparse payload needs int64 indices and one value for each")
    if where.size and (where[0] < 0 or where[-1] >= payload.size or np.any(where[1:] <= where[:-1])):
        raise LocalProtocolError("sparse indices must be strictly ascending and within their layer")
    code, parts = indices.encode(where, payload.size, repeats.streams)
    head = bytes((Tag.SPARSE | code << 3,)) + varint(where.size)
    return [head, *parts, *_encode_values(payload.values, repeats)]


def _encode_residues(payload: Residues, repeats: Repeats, previous: LayerPayload | None) -> list[Part]:
    if not 1 <= payload.bits <= 16 or (payload.check is not None and not 0 <= payload.check < 2**64):
        raise LocalProtocolError("residues have 1 to 16 bits and a check of 64 bits or none")
    _check_scaled(payload.theta, None, repeats.wide, LocalProtocolError)
    _check_codes(payload.residues, payload.bits)
    codes, plan, predicted = payload.residues, None, False
    if predicts(previous, payload.bits, codes.size):
        assert isinstance(previous, Residues)
        if integers.is_small(codes.size, payload.bits):
            change = difference(codes, previous.residues, payload.bits)
            predicted = integers.entropy_of(np.bincount(change)) < integers.entropy_of(np.bincount(codes))
            codes = change if predicted else codes
        else:
            plan = integers.plan_codes(codes, payload.bits)
            other = integers.plan_change(codes, previous.residues, payload.bits)
            if other.bits_needed < plan.bits_needed:
                codes, plan, predicted = difference(codes, previous.residues, payload.bits), other, True
    codec, parts = integers.encode_codes(codes, payload.bits, plan, repeats.streams)
    head = bytearray((Tag.RESIDUES | predicted * _PREDICTED | codec << _CODEC,))
    parameters = (payload.bits, payload.rounding, payload.check is not None)
    if parameters == repeats.residues:
        head[0] |= _SAME
    else:
        head.append(payload.bits - 1 | payload.rounding << 4 | (payload.check is not None) << 6)
        repeats.residues = parameters
    if payload.theta == repeats.theta:
        head[0] |= _SAME_THETA
    else:
        head += _scalar(payload.theta, repeats.wide)
        repeats.theta = payload.theta
    if payload.check is not None:
        head += payload.check.to_bytes(8, "little")
    return [bytes(head), *parts]


def _encode_more_bits(payload: MoreBits, repeats: Repeats) -> list[Part]:
    if not 1 <= payload.bits <= 16 or not 0 <= payload.low <= 64 - payload.bits:
        raise LocalProtocolError(f"a repair cannot hold {payload.bits} bits from bit {payload.low} on")
    _check_codes(payload.codes, payload.bits)
    codec, parts = integers.encode_codes(payload.codes, payload.bits, None, repeats.streams)
    head = bytearray((Tag.MORE_BITS | codec << _CODEC,))
    if (payload.low, payload.bits) == repeats.more_bits:
        head[0] |= _SAME
    else:
        head += bytes((payload.low, payload.bits - 1))
        repeats.more_bits = (payload.low, payload.bits)
    return [bytes(head), *parts]


def _encode_whole_integers(payload: WholeIntegers, repeats: Repeats) -> list[Part]:
    whole = np.ascontiguousarray(payload.integers)
    if whole.dtype != np.int64:
        raise LocalProtocolError(f"whole integers are held as {whole.dtype}")
    folded = ((whole << 1) ^ (whole >> 63)).view(np.uint64)
    width = max(int(folded.max()).bit_length(), 1)
    codec, parts = integers.encode(folded, width, integers.plan_wide(folded, width), repeats.streams)
    return [bytes((Tag.WHOLE_INTEGERS | codec << _CODEC, width - 1)), *parts]


def _check_codes(codes: UnsignedArray, width: int) -> None:
    if codes.dtype != integers.code_type(width) or not codes.flags.c_contiguous:
        raise LocalProtocolError(f"codes of {width} bits are held as {codes.dtype}, or not contiguously")
    if width < 8 * codes.itemsize and codes.size and int(codes.max()) >> width:
        raise LocalProtocolError(f"a code exceeds its {width} bits")


def _scalar(value: float, wide: bool) -> bytes:
    return struct.pack("<d" if wide else "<f", value)


# --- decoding ---------------------------------------------------------------------------------------------------------


def decode(
    reader: Reader,
    size: int,
    repeats: Repeats,
    previous: LayerPayload | None,
    single: bool,
    ledger: Ledger | None = None,
) -> LayerPayload:
    """Return the payload of a layer of `size` numbers. `single`: refuse float64 values."""
    if ledger is not None:
        ledger.begin(reader)
    tag = reader.byte()
    kind, codec = tag & 7, tag >> _CODEC
    if kind == Tag.SPARSE:
        return _decode_sparse(reader, tag >> 3, size, repeats, single, ledger)
    if kind in (Tag.DENSE, Tag.LEVELS):
        return _decode_values(reader, tag, size, repeats, single, ledger)
    if kind == Tag.RESIDUES:
        return _decode_residues(reader, tag, size, repeats, previous, ledger)
    if kind == Tag.MORE_BITS and not tag & (_SAME_THETA | _PREDICTED):
        return _decode_more_bits(reader, tag, size, repeats, ledger)
    if kind == Tag.WHOLE_INTEGERS and not tag & (_SAME | _SAME_THETA | _PREDICTED):
        width = reader.byte() + 1
        if width > 64:
            raise ParameterOutOfRange(f"integers cannot have {width} bits")
        _book(ledger, reader, "header")
        folded = integers.decode(reader, codec, size, width, np.uint64, repeats.streams)
        _book(ledger, reader, "values", codec)
        whole = (folded >> np.uint64(1)).view(np.int64)
        whole ^= -(folded & np.uint64(1)).view(np.int64)
        return WholeIntegers(whole)
    raise UnknownSection(f"a section has the unknown tag {tag:#04x}")


def finish(reader: Reader, repeats: Repeats, ledger: Ledger | None = None) -> None:
    """Read what follows the last section, and with it complete the payloads that `decode` has returned."""
    if ledger is not None:
        ledger.begin(reader)
    indices.decode_pool(reader, repeats.streams)
    _book(ledger, reader, "indices")
    integers.decode_pools(reader, repeats.streams)
    _book(ledger, reader, "values")
    for codes, earlier, bits in repeats.changes:
        codes += earlier
        _keep_low_bits(codes, bits)


def _decode_values(
    reader: Reader, tag: int, size: int, repeats: Repeats, single: bool, ledger: Ledger | None
) -> Dense | Levels:
    codec = tag >> _CODEC
    if tag & 7 == Tag.DENSE and not tag & _PREDICTED:
        _book(ledger, reader, "header")
        dense = _decode_dense(reader, codec, size, ValueType(tag >> 3 & 3), repeats, single)
        _book(ledger, reader, "values", codec)
        return dense
    if tag & 7 != Tag.LEVELS or tag & (_SAME_THETA | _PREDICTED):
        raise UnknownSection(f"the values of a layer have the unknown tag {tag:#04x}")
    if tag & _SAME:
        if repeats.levels is None:
            raise NothingToRepeat("a section repeats the parameters of levels that no section gave")
    else:
        bits = reader.byte() + 1
        parameters = (reader.varint(), unzigzag(reader.varint()), reader.varint(), bits)
        _check_level_parameters(*parameters, ParameterOutOfRange)
        repeats.levels = parameters
    divisor, base, step, bits = repeats.levels
    _book(ledger, reader, "header")
    scale = reader.float64() if repeats.wide else reader.float32()
    _check_scaled(scale, repeats.levels, repeats.wide, NonFiniteValue)
    _book(ledger, reader, "scales")
    codes = integers.decode_codes(reader, codec, size, bits, repeats.streams)
    _book(ledger, reader, "values", codec)
    return Levels(scale, divisor, base, step, bits, codes)


def _decode_dense(
    reader: Reader, codec: int, size: int, value_type: ValueType, repeats: Repeats, single: bool
) -> Dense:
    if single and value_type is ValueType.FLOAT64:
        raise WrongFloatType("a layer holds float64 values where this run computes in float32")
    width, _, dtype = _FORMATS[value_type]
    patterns = integers.decode(reader, codec, size, width, dtype, repeats.streams)
    if codec == Codec.ENTROPY:
        patterns = _rotated(patterns, width - 1)
    values: np.ndarray[tuple[int, ...], np.dtype[np.float32 | np.float64]]
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
    _check_finite(values, NonFiniteValue)
    return Dense(values, value_type)


def _decode_sparse(
    reader: Reader, code: int, size: int, repeats: Repeats, single: bool, ledger: Ledger | None
) -> Sparse:
    count = reader.varint()
    if count > size:
        raise IndexCountOutOfRange(f"a sparse layer of {size} numbers claims {count} entries")
    _book(ledger, reader, "header")
    where = indices.decode(reader, code, count, size, repeats.streams)
    if ledger is not None:
        ledger.book(reader, "indices", indices.name(code))
    tag = reader.byte()
    return Sparse(size, where, _decode_values(reader, tag, count, repeats, single, ledger))


def _decode_residues(
    reader: Reader,
    tag: int,
    size: int,
    repeats: Repeats,
    previous: LayerPayload | None,
    ledger: Ledger | None,
) -> Residues:
    if tag & _SAME:
        if repeats.residues is None:
            raise NothingToRepeat("a section repeats the parameters of residues that no section gave")
    else:
        byte = reader.byte()
        if byte >> 7 or byte >> 4 & 3 > Rounding.DITHER:
            raise ParameterOutOfRange("residues have an unknown rounding")
        repeats.residues = (byte & 15) + 1, Rounding(byte >> 4 & 3), bool(byte & 64)
    bits, rounding, has_check = repeats.residues
    _book(ledger, reader, "header")
    if tag & _SAME_THETA:
        if repeats.theta is None:
            raise NothingToRepeat("a section repeats a θ that no section gave")
    else:
        theta = reader.float64() if repeats.wide else reader.float32()
        _check_scaled(theta, None, repeats.wide, NonFiniteValue)
        repeats.theta = theta
    _book(ledger, reader, "scales")
    check = reader.word64() if has_check else None
    _book(ledger, reader, "checks")
    codes = integers.decode_codes(reader, tag >> _CODEC, size, bits, repeats.streams)
    _book(ledger, reader, "values", tag >> _CODEC)
    if tag & _PREDICTED:
        if not isinstance(previous, Residues) or not predicts(previous, bits, size):
            raise MissingPrevious("residues are coded against earlier ones that this receiver does not hold")
        repeats.changes.append((codes, previous.residues, bits))
    return Residues(repeats.theta, bits, rounding, codes, check)


def _decode_more_bits(reader: Reader, tag: int, size: int, repeats: Repeats, ledger: Ledger | None) -> MoreBits:
    if tag & _SAME:
        if repeats.more_bits is None:
            raise NothingToRepeat("a section repeats the parameters of a repair that no section gave")
    else:
        low, bits = reader.byte(), reader.byte() + 1
        if bits > 16 or low + bits > 64:
            raise ParameterOutOfRange(f"a repair cannot hold {bits} bits from bit {low} on")
        repeats.more_bits = low, bits
    low, bits = repeats.more_bits
    _book(ledger, reader, "header")
    codes = integers.decode_codes(reader, tag >> _CODEC, size, bits, repeats.streams)
    _book(ledger, reader, "values", tag >> _CODEC)
    return MoreBits(low, bits, codes)


def _book(ledger: Ledger | None, reader: Reader, account: str, codec: int | None = None) -> None:
    if ledger is not None:
        ledger.book(reader, account, None if codec is None else Codec(codec).name.lower())


# --- shared by both directions ----------------------------------------------------------------------------------------


def difference(codes: UnsignedArray, previous: UnsignedArray, width: int) -> UnsignedArray:
    """Return (codes − previous) mod 2**width; all arrays `uint8[n]` or `uint16[n]`."""
    change: UnsignedArray = codes - previous
    _keep_low_bits(change, width)
    return change


def _keep_low_bits(codes: UnsignedArray, width: int) -> None:
    if width < 8 * codes.itemsize:
        codes &= codes.dtype.type((1 << width) - 1)


def predicts(previous: LayerPayload | None, width: int, size: int) -> bool:
    """Return whether residues of `width` bits can be coded against an earlier payload of their layer."""
    return isinstance(previous, Residues) and previous.bits == width and previous.residues.size == size


def _rotated(patterns: UnsignedArray, by: int) -> UnsignedArray:
    """Return the bit patterns rotated left."""
    kind = patterns.dtype.type
    result: UnsignedArray = patterns << kind(by)
    result |= patterns >> kind(8 * patterns.itemsize - by)
    return result


def _check_finite(values: np.ndarray[tuple[int, ...], np.dtype[Any]], error: type[Exception]) -> None:
    for start in range(0, values.size, 4 * CHUNK):
        if not np.isfinite(values[start : start + 4 * CHUNK]).all():
            raise error("a layer holds an infinite value or one that is not a number")


def _check_level_parameters(divisor: int, base: int, step: int, bits: int, error: type[Exception]) -> None:
    if not (1 <= bits <= 16 and 1 <= divisor <= EXACT and 1 <= step <= EXACT):
        raise error(f"levels cannot have divisor {divisor}, step {step} and {bits} bits")
    if abs(base) + (step << bits) > EXACT:
        raise (LevelOutOfRange if error is ParameterOutOfRange else error)(
            f"levels from {base} in steps of {step} with {bits} bits exceed exact integers"
        )


def _check_scaled(scale: float, levels: tuple[int, int, int, int] | None, wide: bool, error: type[Exception]) -> None:
    """Raise `error` unless scale · level is finite for every level, in the float type of the frame."""
    greatest = 1 if levels is None else max(abs(levels[1]), abs(levels[1] + (levels[2] << levels[3])))
    limit = _GREATEST[wide]
    if not (math.isfinite(scale) and abs(scale) * greatest <= limit):
        raise error(f"a scale or θ of {scale} is not finite, or a level times it is not")
