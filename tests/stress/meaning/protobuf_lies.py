"""Well-formed protobuf messages with hostile content, for any message type: made from its descriptor."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from random import Random
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

_SMALL = (0, 1, 2, 3, 4, 5, 7, 9, 15, 16, 100, 1000, 1024)
_LARGE = (65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 53, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_REALS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e300, -1e300, 5e-324, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "peer-0", "peer-1", "peer-2", "peer-3", "test", "holdout", "127.0.0.1:1", "\x1b[2J", "a\nb\r\n", "ä" * 40)
_MOST_REPEATED = 1500
_DEEPEST = 3

_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def changed(random: Random, honest: M, changes: int, blobs: tuple[bytes, ...] = ()) -> M:
    """Return a copy of a message with so many fields changed. `blobs`: what bytes may be, beside noise."""
    lie = type(honest)()
    lie.CopyFrom(honest)
    for _ in range(changes):
        _change(random, lie, blobs, 0)
    return lie


def _change(random: Random, message: Message, blobs: tuple[bytes, ...], depth: int) -> None:
    fields = cast(Sequence[FieldDescriptor], message.DESCRIPTOR.fields)
    if not fields:
        return
    field = random.choice(fields)
    if random.random() < 0.15:
        message.ClearField(field.name)
        return
    if field.is_repeated:
        _change_repeated(random, message, field, blobs, depth)
    elif field.message_type is not None:
        if depth < _DEEPEST:
            inner = getattr(message, field.name)
            inner.SetInParent()
            _change(random, inner, blobs, depth + 1)
    else:
        setattr(message, field.name, _scalar(random, field, blobs))


def _change_repeated(
    random: Random, message: Message, field: FieldDescriptor, blobs: tuple[bytes, ...], depth: int
) -> None:
    entries = getattr(message, field.name)
    count = random.choice((1, 1, 2, 3, 10, 20, _MOST_REPEATED if random.random() < 0.1 else 5))
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            _change_map(random, entries, field.message_type, blobs, count)
            return
        if entries and random.random() < 0.6:
            _change(random, random.choice(entries), blobs, depth + 1)
            return
        for _ in range(min(count, 20) if depth < _DEEPEST else 0):
            _change(random, entries.add(), blobs, depth + 1)
    elif entries and random.random() < 0.6:
        entries[random.randrange(len(entries))] = _scalar(random, field, blobs)
    else:
        entries.extend([_scalar(random, field, blobs)] * count)


def _change_map(
    random: Random, entries: MutableMapping[Any, Any], entry: Descriptor, blobs: tuple[bytes, ...], count: int
) -> None:
    """Change a value of a map from scalars to scalars, or add some."""
    kinds = entry.fields_by_name
    keys = [random.choice(sorted(entries))] if entries and random.random() < 0.6 else []
    for key in keys or [_scalar(random, kinds["key"], blobs) for _ in range(count)]:
        entries[key] = _scalar(random, kinds["value"], blobs)


def _scalar(random: Random, field: FieldDescriptor, blobs: tuple[bytes, ...]) -> Any:
    if field.cpp_type in _RANGES:
        low, high = _RANGES[field.cpp_type]
        value = random.choice(_SMALL if random.random() < 0.6 else _LARGE)
        return min(high, max(low, -value if random.random() < 0.1 else value))
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return random.choice(_REALS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return random.random() < 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return random.choice((*range(8), 1000))
    if field.type == FieldDescriptor.TYPE_STRING:
        return random.choice(_TEXTS) * random.choice((1, 1, 1, 60, 1000 if random.random() < 0.1 else 1))
    return random.choice(
        (b"", random.randbytes(random.choice((1, 16, 70, 300))), *blobs[: random.randrange(len(blobs) + 1)])
    )
