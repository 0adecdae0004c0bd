"""Frames: messages to bytes and back. The format itself is described in the package's docstring."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from peer.compress.columns import Columns
from peer.compress.layout import Layout
from peer.compress.payload import Dense, LayerPayload, Levels, MoreBits, Sparse, WholeIntegers, num_values
from peer.errors import LocalProtocolError
from peer.wire import checksum, section_columns, section_reader, section_writer
from peer.wire.checksum import crc32
from peer.wire.errors import (
    BadMagic,
    ChecksumMismatch,
    FrameTooLarge,
    LayerCountMismatch,
    LayerNumberOutOfRange,
    MissingPrevious,
    PartTooLarge,
    TrailingBytes,
    TruncatedFrame,
    UnknownKind,
    UnsupportedVersion,
    WeightOutOfRange,
    WishOutOfRange,
    WrongFloatType,
)
from peer.wire.message import Message, MessageKind, RepairWish
from peer.wire.reader import MAX_VARINT, Reader, varint
from peer.wire.sections import Tag

MAGIC = b"SV"
VERSION = 1

_KINDS = tuple(MessageKind)
_WIDE = 1 << 4
_PREDICTED = 1 << 5
_REPAIRS = (MoreBits, WholeIntegers)
_WITHOUT_LAYERS = (MessageKind.NOTHING, MessageKind.REPAIR_REQUEST, MessageKind.PAIR_BUSY)
_REPAIR_TAGS = frozenset({Tag.MORE_BITS, Tag.WHOLE_INTEGERS})
_GOSSIP_TAGS = frozenset(Tag) - _REPAIR_TAGS
_TAGS = {MessageKind.REPAIR: _REPAIR_TAGS, MessageKind.PART: frozenset({Tag.DENSE, Tag.LEVELS, Tag.SPARSE})}
"""Tags of sections in messages of kinds for which they are not `_GOSSIP_TAGS`."""
_LONG_PART_TAGS = frozenset({Tag.LEVELS})
"""Those in parts of more numbers than the layout has."""
_LARGEST_RECIPROCAL = 1 << 16


def max_frame_bytes(layout: Layout) -> int:
    """Return the greatest length of an honest frame about this layout: 9 bytes a number, 64 a layer, 128."""
    return 9 * layout.size + 64 * layout.num_layers + 128


def allocation_bound(layout: Layout) -> int:
    """Return the most bytes that `decode` allocates for any frame, the message that it returns included."""
    return 48 * layout.size + 1024 * layout.num_layers + (4 << 20)


def encode(message: Message, layout: Layout, *, previous: Message | None = None, packed: bool = False) -> bytes:
    """Return the frame of a message, see `encode_counted`."""
    return encode_counted(message, layout, previous=previous, packed=packed)[0]


def encode_counted(
    message: Message, layout: Layout, *, previous: Message | None = None, packed: bool = False
) -> tuple[bytes, int]:
    """Return the frame of a message, and how many of its bytes are the layers': all but the header and the checksum.

    `packed`: write every real and code in its full width, which is faster and takes more bytes; any reader reads it.
    `previous` is an earlier message of the same sender that every receiver of this frame is known to hold: residues
    are then coded as differences to it where that is shorter. Raises `LocalProtocolError` for a message that breaks
    the contract of its types.
    """
    _check_message(message, layout)
    if packed or (
        previous is not None
        and not (
            _has_residues(message, layout) and previous.sender == message.sender and _has_residues(previous, layout)
        )
    ):
        previous = None
    wide = section_writer.needs_double(message.layers)
    earlier = None if previous is None else previous.layers
    is_whole = message.layer_ids is None and message.kind is not MessageKind.PART and len(message.layers) > 0
    written = section_columns.encode(message.layers, layout.size_array, earlier, wide, packed) if is_whole else None
    if written is None:
        sizes: Sequence[int]
        if message.kind is MessageKind.PART:
            sizes = [num_values(layer) for layer in message.layers]
        else:
            numbers = range(layout.num_layers) if message.layer_ids is None else message.layer_ids
            sizes = [layout.sizes[number] for number in numbers[: len(message.layers)]]
        written = section_writer.encode(message.layers, sizes, earlier, wide, packed)
    parts, predicted = written
    header = bytearray(MAGIC)
    header += bytes((VERSION, message.kind | wide * _WIDE | predicted * _PREDICTED))
    header += varint(message.sender) + varint(message.round) + varint(message.phase)
    header += _weight(message.mixing_weight) + _weight(message.push_weight)
    if predicted and previous is not None:
        header += varint(previous.round) + varint(previous.phase)
    if message.kind is MessageKind.REPAIR_REQUEST:
        header += varint(len(message.wanted)) + _numbers([wish.layer for wish in message.wanted])
        header += b"".join(bytes((wish.known_bits, wish.more_bits)) for wish in message.wanted)
    else:
        header += varint(len(message.layers))
        if message.layer_ids is not None:
            header += _numbers(message.layer_ids)
        if message.kind is MessageKind.PART:
            header += b"".join(map(varint, sizes))
    parts.insert(0, bytes(header))
    total = 0
    for part in parts:
        total = crc32(part, total)
    parts.append(total.to_bytes(checksum.BYTES, "little"))
    frame = b"".join(parts)
    return frame, len(frame) - len(header) - checksum.BYTES


def decode(
    frame: bytes | bytearray | memoryview,
    layout: Layout,
    *,
    dtype: npt.DTypeLike | None = None,
    previous: Message | None = None,
    ledgers: list[section_reader.Ledger] | None = None,
) -> Message:
    """Return the message of a frame that came from outside. Raises only `FrameError`s.

    `dtype` float32: refuse float64 numbers. `previous`: the message that residues may be coded against; without it, or
    with another than the frame names, such a frame raises `MissingPrevious`. `ledgers` receives one
    entry for the header, one for each section and one for the pools. Never allocates more than `allocation_bound`.
    """
    data = memoryview(frame).cast("B")
    if len(data) > max_frame_bytes(layout):
        raise FrameTooLarge(f"a frame of {len(data)} bytes; no message here needs {max_frame_bytes(layout)}")
    single = dtype is not None and (dtype is np.float32 or np.dtype(dtype) == np.float32)
    if ledgers is None:
        message = section_columns.decode(data, layout, previous, single=single)
        if message is not None:
            return message
    if len(data) < len(MAGIC) + 2 + checksum.BYTES:
        raise TruncatedFrame(f"a frame of {len(data)} bytes is shorter than any header")
    if data[:2] != MAGIC:
        raise BadMagic("the bytes do not begin like a frame")
    if data[2] != VERSION:
        raise UnsupportedVersion(f"the frame is of version {data[2]}; this program speaks version {VERSION}")
    if not checksum.is_right(data):
        raise ChecksumMismatch("the frame's checksum does not match its bytes")
    reader = Reader(data, 0, len(data) - checksum.BYTES)
    if ledgers is not None:
        ledgers.append(section_reader.Ledger())
        ledgers[0].begin(reader)
    reader.take(3)
    flags = reader.byte()
    if flags & 15 >= len(_KINDS) or flags >> 6:
        raise UnknownKind(f"the header's kind and flags {flags:#04x} have no meaning")
    kind = _KINDS[flags & 15]
    if single and flags & _WIDE:
        raise WrongFloatType("the frame's scales are float64 where this run computes in float32")
    sender, round_, phase = reader.varint(), reader.varint(), reader.varint()
    mixing_weight, push_weight = _read_weight(reader), _read_weight(reader)
    if push_weight < 0:
        raise WeightOutOfRange(f"a push weight of {push_weight} is negative")
    earlier: Sequence[LayerPayload] | None = None
    if flags & _PREDICTED:
        named = reader.varint(), reader.varint()
        if previous is None or (previous.sender, previous.round, previous.phase) != (sender, *named):
            raise MissingPrevious(f"the frame needs the message of round {named[0]}.{named[1]} of peer {sender}")
        if not _has_residues(previous, layout):
            raise MissingPrevious("the message that the frame is coded against has other layers")
        earlier = previous.layers
    count = reader.varint()
    layer_ids: tuple[int, ...] | None = None
    wanted: tuple[RepairWish, ...] = ()
    if kind in _WITHOUT_LAYERS and kind is not MessageKind.REPAIR_REQUEST:
        expected = 0
    elif kind is MessageKind.PART:
        expected = min(count, layout.num_layers + 1)
    elif kind in (MessageKind.REPAIR_REQUEST, MessageKind.REPAIR):
        expected = min(count, layout.num_layers)
    else:
        expected = layout.num_layers
    if count != expected:
        raise LayerCountMismatch(f"a message of kind {kind.name} has {count} layers where the layout has {expected}")
    numbers: Sequence[int] = ()
    sizes: list[tuple[int, LayerPayload | None]] = []
    if kind is MessageKind.REPAIR_REQUEST:
        ids = _read_numbers(reader, count, layout.num_layers)
        wanted = tuple(_read_wish(reader, number) for number in ids)
    elif kind is MessageKind.PART:
        sizes = [(size, None) for size in _read_sizes(reader, count, 2 * layout.size)]
    elif kind is MessageKind.REPAIR:
        numbers = layer_ids = _read_numbers(reader, count, layout.num_layers)
    else:
        numbers = range(count)
    if ledgers is not None:
        ledgers[0].book(reader, "header")
    sizes += [(layout.sizes[number], None if earlier is None else earlier[number]) for number in numbers]
    tags, wide = _TAGS.get(kind, _GOSSIP_TAGS), bool(flags & _WIDE)
    if kind is MessageKind.PART and sum(size for size, _ in sizes) > layout.size:
        tags = _LONG_PART_TAGS
    layers = section_reader.decode(reader, sizes, tags=tags, wide=wide, single=single, ledgers=ledgers)
    if reader.left:
        raise TrailingBytes(f"{reader.left} bytes follow the last section")
    return Message(kind, sender, round_, phase, mixing_weight, push_weight, layers, layer_ids, wanted)


def _check_message(message: Message, layout: Layout) -> None:
    kind, ids = message.kind, message.layer_ids
    if (
        max(message.sender, message.round, message.phase) > MAX_VARINT
        or min(message.sender, message.round, message.phase) < 0
    ):
        raise LocalProtocolError(f"sender, round and phase must be 0 to 2**64 − 1: {message}")
    if not math.isfinite(message.mixing_weight) or not math.isfinite(message.push_weight) or message.push_weight < 0:
        raise LocalProtocolError(f"weights {message.mixing_weight} and {message.push_weight} cannot be sent")
    if kind in _WITHOUT_LAYERS:
        expected = 0
    elif kind is MessageKind.REPAIR:
        if ids is None or not _ascending(ids, layout.num_layers):
            raise LocalProtocolError("a repair names its layers in ascending order")
        expected = len(ids)
    elif kind is MessageKind.PART:
        expected = min(len(message.layers), layout.num_layers + 1)
        if not all(isinstance(layer, (Dense, Levels, Sparse)) and num_values(layer) for layer in message.layers):
            raise LocalProtocolError(f"a part holds numbers, and no empty sections: {message}")
        most = layout.size * (2 if all(isinstance(layer, Levels) for layer in message.layers) else 1)
        if sum(map(num_values, message.layers)) > most:
            raise LocalProtocolError(
                f"a part in this form has at most {most} numbers where the layout has {layout.size}"
            )
    else:
        expected = layout.num_layers
    if len(message.layers) != expected or (ids is not None) != (kind is MessageKind.REPAIR):
        raise LocalProtocolError(f"a {kind.name} message has {expected} layers here, not {len(message.layers)}")
    if isinstance(message.layers, Columns):
        fits = kind is not MessageKind.REPAIR
    else:
        fits = all(isinstance(layer, _REPAIRS) == (kind is MessageKind.REPAIR) for layer in message.layers)
    if not fits:
        raise LocalProtocolError(f"a {kind.name} message cannot hold these payloads: {message}")
    if message.wanted and kind is not MessageKind.REPAIR_REQUEST:
        raise LocalProtocolError(f"a {kind.name} message cannot ask for repairs")
    if not _ascending([wish.layer for wish in message.wanted], layout.num_layers) or not all(
        0 <= wish.known_bits <= 64 and 0 <= wish.more_bits <= 16 for wish in message.wanted
    ):
        raise LocalProtocolError(f"a repair request cannot hold these wishes: {message.wanted}")


def _has_residues(message: Message, layout: Layout) -> bool:
    return message.layer_ids is None and len(message.layers) == layout.num_layers


def _weight(weight: float) -> bytes:
    """Return a weight: 0 for 0.0, m + 1 for 1/m, otherwise 1 and the float64."""
    if weight == 0.0 and math.copysign(1.0, weight) > 0:
        return b"\0"
    if 1.0 / _LARGEST_RECIPROCAL <= weight <= 1.0:
        m = round(1.0 / weight)
        if 1.0 / m == weight:
            return varint(m + 1)
    return b"\1" + struct.pack("<d", weight)


def _read_weight(reader: Reader) -> float:
    form = reader.varint()
    if form == 0:
        return 0.0
    weight = reader.float64() if form == 1 else 1.0 / (form - 1)
    if not math.isfinite(weight):
        raise WeightOutOfRange(f"a weight of {weight} cannot be")
    return weight


def _numbers(ids: Sequence[int]) -> bytes:
    """Return ascending layer numbers, each as the count of those skipped."""
    return b"".join(varint(number - before - 1) for before, number in zip((-1, *ids), ids, strict=False))


def _read_numbers(reader: Reader, count: int, num_layers: int) -> tuple[int, ...]:
    ids: list[int] = []
    last = -1
    for _ in range(count):
        last += reader.varint() + 1
        if last >= num_layers:
            raise LayerNumberOutOfRange(f"layer {last} is named where the layout has {num_layers}")
        ids.append(last)
    return tuple(ids)


def _read_sizes(reader: Reader, count: int, most: int) -> list[int]:
    sizes = [reader.varint() for _ in range(count)]
    if 0 in sizes or sum(sizes) > most:
        raise PartTooLarge(f"a part of {sum(sizes)} numbers in {count} sections, where at most {most} can be")
    return sizes


def _read_wish(reader: Reader, layer: int) -> RepairWish:
    known_bits, more_bits = reader.byte(), reader.byte()
    if known_bits > 64 or more_bits > 16:
        raise WishOutOfRange(f"a repair request asks for {more_bits} bits above {known_bits}")
    return RepairWish(layer, known_bits, more_bits)


def _ascending(ids: Sequence[int], limit: int) -> bool:
    return all(a < b for a, b in zip((-1, *ids), (*ids, limit), strict=True))
