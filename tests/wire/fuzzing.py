"""The fuzz target of the wire: one input, and every promise that decoding it has to keep.

Only `FrameError`s may leave the decoder; what decodes must encode and decode to itself; the numpy code must agree with
the native kernels about value or error; no input may make the decoder allocate more than it states.

An input is one byte that chooses the circumstances (see `Circumstances`; with bit 7 the rest is the whole frame), and
the frame without the bytes that mutation would only ever spoil: magic, version and checksum, which `frame_of` puts
back. `tests.stress.fuzz` makes inputs up; the tests replay those in `corpus/`.
"""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from peer import native
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
from peer.errors import FrameError
from peer.wire import Message, MessageKind, RepairWish, decode, encode
from peer.wire.frame import MAGIC, VERSION, allocation_bound
from tests.wire.comparing import assert_same, pure

CORPUS = Path(__file__).parent / "corpus"
LAYOUTS = (
    Layout.of_sizes([40]),
    Layout.of_sizes([300, 33, 2, 1]),
    Layout.of_sizes([2500, 64]),
    Layout.of_sizes([7] * 20),
)


@dataclass(frozen=True)
class Circumstances:
    """What the first byte of an input chooses."""

    layout: Layout
    """Bits 0 and 1."""
    previous: Message | None
    """Bit 2: whether the receiver holds the message that residues may be coded against."""
    single: bool
    """Bit 3: whether the run is one of float32."""
    compares: bool
    """Bits 4 and 6: whether numpy has to agree with the kernels (slow, so only where both are set)."""
    measures: bool
    """Bits 5 and 6: whether allocations are counted (slow, too)."""

    @classmethod
    @lru_cache
    def of(cls, byte: int) -> Circumstances:
        layout = LAYOUTS[byte & 3]
        return cls(
            layout,
            earlier_message(layout) if byte & 4 else None,
            bool(byte & 8),
            byte & 80 == 80,
            byte & 96 == 96,
        )


@lru_cache
def earlier_message(layout: Layout) -> Message:
    """Return the message that predicted residues refer to."""
    rng = np.random.default_rng(5)
    layers = tuple(_residues(rng.integers(0, 256, size).astype(np.uint8), 8) for size in layout.sizes)
    return Message(MessageKind.GOSSIP, 3, 7, layers=layers)


def frame_of(data: bytes) -> bytes:
    """Return the frame that an input stands for."""
    if not data or data[0] & 128:
        return data[1:]
    body = MAGIC + bytes((VERSION,)) + data[1:]
    return body + zlib.crc32(body).to_bytes(4, "little")


def input_of(selector: int, frame: bytes) -> bytes:
    """Return the input that stands for a frame."""
    return bytes((selector,)) + (frame if selector & 128 else frame[3:-4])


def check(data: bytes) -> Message | FrameError | None:
    """Decode one input and return what came of it. Raises AssertionError for a broken promise, and whatever else the
    decoder let escape."""
    if not data:
        return None
    case = Circumstances.of(data[0])
    frame = frame_of(data)
    dtype = np.float32 if case.single else None

    def outcome() -> Message | FrameError:
        try:
            return decode(frame, case.layout, dtype=dtype, previous=case.previous)
        except FrameError as error:
            return error

    if case.measures:
        tracemalloc.start()
        result = outcome()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= allocation_bound(case.layout), f"{peak} bytes for a layout of {case.layout.size} numbers"
    else:
        result = outcome()
    if case.compares and native.lib is not None:
        with pure():
            other = outcome()
        assert type(other) is type(result), f"the kernels say {result!r}, numpy says {other!r}"
        if isinstance(result, Message) and isinstance(other, Message):
            assert_same(result, other)
    if isinstance(result, Message):
        # What was decoded survives another round trip.
        assert_same(
            result, decode(encode(result, case.layout, previous=case.previous), case.layout, previous=case.previous)
        )
    return result


def seeds() -> list[bytes]:
    """Return one honest input for every kind of message, payload and codec."""
    rng = np.random.default_rng(1)
    found: list[bytes] = []
    for number, layout in enumerate(LAYOUTS):
        for maker in _MAKERS:
            layers = tuple(maker(size, rng) for size in layout.sizes)
            repair = isinstance(layers[0], (MoreBits, WholeIntegers))
            message = Message(
                MessageKind.REPAIR if repair else MessageKind.GOSSIP,
                sender=3,
                round=9,
                mixing_weight=1 / 3,
                push_weight=0.98765,
                layers=layers,
                layer_ids=tuple(range(layout.num_layers)) if repair else None,
            )
            for selector in (number, number | 4 | 80, number | 96):
                previous = Circumstances.of(selector).previous
                found.append(input_of(selector, encode(message, layout, previous=previous)))
        found += [
            input_of(number, encode(message, layout))
            for message in (
                Message(MessageKind.NOTHING, 1, 2),
                Message(MessageKind.PAIR_BUSY, 1, 2, 3),
                Message(MessageKind.REPAIR_REQUEST, 1, 2, wanted=(RepairWish(0, 4, 2),)),
            )
        ]
        found.append(input_of(number | 128, encode(Message(MessageKind.NOTHING, 1, 2), layout)))
    return found


def _residues(codes: np.ndarray, bits: int) -> Residues:
    return Residues(2.0, bits, Rounding.DITHER, codes, 1234567890)


def _heap(size: int, bits: int, rng: np.random.Generator) -> np.ndarray:
    codes = np.clip(np.rint(rng.normal(2**bits / 2, 2**bits / 20, size)), 0, 2**bits - 1)
    return codes.astype(np.uint8 if bits <= 8 else np.uint16)


def _some(size: int, share: float, rng: np.random.Generator) -> np.ndarray:
    return np.sort(rng.choice(size, max(1, round(share * size)), replace=False))


def as_type(values: np.ndarray, value_type: ValueType) -> Dense:
    """Return numbers of which each is one of the type."""
    if value_type is ValueType.FLOAT64:
        return Dense(values, value_type)
    single = values.astype(np.float32)
    if value_type is ValueType.BFLOAT16:
        single = (single.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    elif value_type is ValueType.FLOAT16:
        single = single.astype(np.float16).astype(np.float32)
    return Dense(single, value_type)


def _make_sparse(size: int, share: float, exact: bool, rng: np.random.Generator) -> Sparse:
    where = _some(size, share, rng)
    values: Dense | Levels = Levels(0.25, 7, -7, 1, 4, _heap(where.size, 4, rng))
    if exact:
        values = Dense(rng.standard_normal(where.size).astype(np.float32), ValueType.FLOAT32)
    return Sparse(size, where, values)


_MAKERS: tuple[Callable[[int, np.random.Generator], LayerPayload], ...] = (
    lambda size, rng: as_type(rng.standard_normal(size), ValueType.FLOAT64),
    lambda size, rng: as_type(rng.standard_normal(size), ValueType.FLOAT32),
    lambda size, rng: as_type(rng.standard_normal(size), ValueType.BFLOAT16),
    lambda size, rng: as_type(rng.standard_normal(size), ValueType.FLOAT16),
    lambda size, rng: _make_sparse(size, 0.02, False, rng),
    lambda size, rng: _make_sparse(size, 0.1, True, rng),
    lambda size, rng: _make_sparse(size, 0.5, False, rng),
    lambda size, rng: _make_sparse(size, 1.0, False, rng),
    lambda size, rng: Levels(0.1, 1, -1, 1, 2, rng.choice(3, size, p=[0.05, 0.9, 0.05]).astype(np.uint8)),
    lambda size, rng: Levels(0.1, 1, -1, 2, 1, rng.integers(0, 2, size).astype(np.uint8)),
    lambda size, rng: Levels(1 / 3, 255, -255, 1, 9, _heap(size, 9, rng)),
    lambda size, rng: Levels(0.1, 255, -255, 1, 9, np.repeat(_heap(size, 9, rng), 50)[:size]),
    lambda size, rng: _residues(rng.integers(0, 16, size).astype(np.uint8), 4),
    lambda size, rng: _residues(_heap(size, 8, rng), 8),
    lambda size, rng: MoreBits(8, 3, rng.integers(0, 8, size).astype(np.uint8)),
    lambda size, rng: WholeIntegers(np.rint(rng.normal(0, 500, size)).astype(np.int64)),
)
