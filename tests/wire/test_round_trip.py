"""The format's one law: decode(encode(m)) is m, to the last bit, whichever implementation did either."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peer import native
from peer.compress.layout import Layout
from peer.compress.payload import Dense, Levels, MoreBits, Residues, Rounding, Sparse, ValueType
from peer.wire import Message, MessageKind, decode, encode, max_frame_bytes
from tests.wire import reference
from tests.wire.comparing import assert_same, pure
from tests.wire.strategies import messages

needs_kernels = pytest.mark.skipif(native.lib is None, reason="the native kernels were not built")
relaxed = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@relaxed
@given(messages())
def test_every_message_comes_back_as_it_was(case: tuple[Message, Layout]) -> None:
    message, layout = case
    frame = encode(message, layout)
    assert len(frame) <= max_frame_bytes(layout)
    assert_same(decode(frame, layout), message)
    assert_same(decode(memoryview(bytearray(frame)), layout), message)


@needs_kernels
@relaxed
@given(messages())
def test_numpy_and_the_kernels_write_the_same_bytes_and_read_each_others(case: tuple[Message, Layout]) -> None:
    message, layout = case
    native_frame = encode(message, layout)
    with pure():
        pure_frame = encode(message, layout)
        assert_same(decode(native_frame, layout), message)
    assert pure_frame == native_frame
    assert_same(decode(pure_frame, layout), message)


@settings(relaxed, max_examples=60)
@given(messages())
def test_a_reader_written_from_the_description_understands_every_message(case: tuple[Message, Layout]) -> None:
    message, layout = case
    assert_same(reference.decode(encode(message, layout), layout), message)


@relaxed
@given(st.data())
def test_frames_coded_against_an_earlier_message_come_back(data: st.DataObject) -> None:
    size, bits = data.draw(st.integers(1, 3000)), data.draw(st.integers(1, 16))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dtype = np.uint8 if bits <= 8 else np.uint16
    first = rng.integers(0, 2**bits, size).astype(dtype)
    second = ((first + np.rint(rng.normal(0, 1 + 2**bits / 100, size)).astype(np.int64)) % 2**bits).astype(dtype)
    layout = Layout.of_sizes([size])
    earlier = _residues(first, bits, 7)
    message = _residues(second, bits, 9)
    frame = encode(message, layout, previous=earlier)
    assert_same(decode(frame, layout, previous=earlier), message)


def test_a_small_change_of_the_own_codes_saves_what_their_entropy_says(implementation: str) -> None:
    rng = np.random.default_rng(1)
    first = rng.integers(0, 256, 50_000).astype(np.uint8)
    second = (first + np.rint(rng.normal(0, 3, first.size)).astype(np.int64)).astype(np.uint8)
    layout = Layout.of_sizes([first.size])
    earlier, message = _residues(first, 8, 1), _residues(second, 8, 2)
    alone, against = encode(message, layout), encode(message, layout, previous=earlier)
    entropy = 0.5 * np.log2(2 * np.pi * np.e * (9 + 1 / 12))
    assert len(alone) >= first.size
    assert len(against) * 8 / first.size == pytest.approx(entropy, rel=0.03)


@pytest.mark.parametrize("value_type", ValueType)
def test_zeros_keep_their_sign_and_subnormals_their_bits(value_type: ValueType, implementation: str) -> None:
    tiny = {ValueType.FLOAT64: 5e-324, ValueType.FLOAT32: 1e-45, ValueType.BFLOAT16: 1e-40, ValueType.FLOAT16: 6e-8}
    held = np.float64 if value_type is ValueType.FLOAT64 else np.float32
    least = np.array([tiny[value_type]], held)
    if value_type is ValueType.BFLOAT16:
        least = (least.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    elif value_type is ValueType.FLOAT16:
        least = least.astype(np.float16).astype(np.float32)
    assert least[0] != 0
    values = np.tile(np.array([0.0, -0.0, least[0], -least[0], 1.5, -2.0], held), 40)
    message = Message(MessageKind.GOSSIP, 0, 0, layers=(Dense(values, value_type),))
    layout = Layout.of_sizes([values.size])
    assert_same(decode(encode(message, layout), layout), message)


@pytest.mark.parametrize("bits", range(1, 17))
def test_codes_of_every_width_survive_beyond_one_piece(bits: int, implementation: str) -> None:
    size = 70_001
    rng = np.random.default_rng(bits)
    dtype = np.uint8 if bits <= 8 else np.uint16
    even = rng.integers(0, 2**bits, size).astype(dtype)
    heaped = np.clip(np.rint(rng.normal(2**bits / 2, 2**bits / 20, size)), 0, 2**bits - 1).astype(dtype)
    layout = Layout.of_sizes([size, size])
    layers = (Residues(2.0, bits, Rounding.DITHER, even, None), Levels(0.5, 3, -1, 1, bits, heaped))
    message = Message(MessageKind.GOSSIP, 1, 2, layers=layers)
    assert_same(decode(encode(message, layout), layout), message)


@pytest.mark.parametrize("count", [0, 1, 5, 60, 700, 7000, 30_000, 69_999, 70_000])
def test_index_sets_of_every_density_survive(count: int, implementation: str) -> None:
    rng = np.random.default_rng(count)
    where = np.sort(rng.choice(70_000, count, replace=False))
    values = Levels(1.0, 7, -7, 1, 4, rng.integers(0, 15, count).astype(np.uint8))
    message = Message(MessageKind.PAIR_REPLY, 1, 2, layers=(Sparse(70_000, where, values),))
    layout = Layout.of_sizes([70_000])
    assert_same(decode(encode(message, layout), layout), message)


def _residues(codes: np.ndarray, bits: int, round_: int) -> Message:
    return Message(MessageKind.GOSSIP, 4, round_, layers=(Residues(2.0, bits, Rounding.NEAREST, codes, None),))


@pytest.mark.parametrize("kind", [MessageKind.NOTHING, MessageKind.PAIR_BUSY, MessageKind.REPAIR])
def test_a_message_without_residues_ignores_an_earlier_one(kind: MessageKind) -> None:
    codes = np.arange(90).astype(np.uint8)
    layers, layer_ids = ((), None) if kind is not MessageKind.REPAIR else ((MoreBits(8, 8, codes),), (0,))
    message = Message(kind, 4, 9, layers=layers, layer_ids=layer_ids)
    layout = Layout.of_sizes([codes.size])
    assert_same(decode(encode(message, layout, previous=_residues(codes, 8, 7)), layout), message)
