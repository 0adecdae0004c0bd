"""Sections of all layers at once: the bytes, the messages and the errors of the writer and reader layer by layer."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peer import compress, native
from peer.compress.base import compress_layers
from peer.compress.columns import Columns, columns_of
from peer.compress.layout import Layout
from peer.compress.payload import Dense, LayerPayload, Levels, Residues, Rounding, Sparse, ValueType
from peer.errors import FrameError, LocalProtocolError
from peer.random import PeerDraws
from peer.wire import Message, MessageKind, decode, encode, encode_counted, section_columns
from tests.wire import fuzzing, reference
from tests.wire.comparing import assert_same, pure
from tests.wire.strategies import code_arrays, dense, finite32, finite64
from tools.frame_report import describe

needs_kernels = pytest.mark.skipif(native.lib is None, reason="the native kernels were not built")
relaxed = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Leave everything to section_writer and section_reader."""
    nothing = {"encode": mock.Mock(return_value=None), "decode": mock.Mock(return_value=None)}
    with mock.patch.multiple(section_columns, **nothing):
        yield


@st.composite
def uniform_messages(draw: st.DrawFn) -> tuple[Message, Layout]:
    """Messages with one kind of payload and one set of parameters, but for small layers, which may be whole."""
    sizes = draw(st.lists(st.one_of(st.integers(1, 20), st.integers(1, 3000)), min_size=2, max_size=12))
    whole_below = draw(st.sampled_from([0, 0, 4, 30]))
    kind = draw(st.sampled_from(["dense", "levels", "sparse dense", "sparse levels", "residues"]))
    scalars = draw(st.sampled_from([finite32, finite64])).filter(lambda s: abs(s) * 2**53 < 3e38)
    value_type = draw(st.sampled_from(ValueType))
    bits = draw(st.integers(1, 16))
    parameters = draw(st.sampled_from([(7, -7, 1), (1, -1, 2), (2**53, -(2**52), 2**35), (1, 0, 1)]))
    rounding, verified = draw(st.sampled_from(Rounding)), draw(st.booleans())
    theta = draw(scalars)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def payload(size: int) -> LayerPayload:
        if kind == "dense" or size < whole_below:
            return draw(dense(size, (value_type,)))
        if kind == "levels":
            return Levels(draw(scalars), *parameters, bits, draw(code_arrays(size, bits)))
        if kind == "residues":
            check = draw(st.integers(0, 2**64 - 1)) if verified else None
            own = theta if draw(st.booleans()) else draw(scalars)
            return Residues(own, bits, rounding, draw(code_arrays(size, bits)), check)
        count = draw(st.one_of(st.integers(0, size), st.integers(0, min(size, 3))))
        where = np.sort(rng.choice(size, count, replace=False)).astype(np.int64)
        if kind == "sparse dense":
            return Sparse(size, where, draw(dense(count, (value_type,))))
        return Sparse(size, where, Levels(draw(scalars), *parameters, bits, draw(code_arrays(count, bits))))

    layers = tuple(payload(size) for size in sizes)
    message = Message(MessageKind.GOSSIP, 3, 8, mixing_weight=1 / 3, layers=layers)
    return message, Layout.of_sizes(sizes)


@needs_kernels
@relaxed
@given(uniform_messages())
def test_all_at_once_and_layer_by_layer_write_the_same_bytes(case: tuple[Message, Layout]) -> None:
    message, layout = case
    frame = encode(message, layout)
    with layer_by_layer():
        assert encode(message, layout) == frame
    with pure():
        assert encode(message, layout) == frame
    read = decode(frame, layout)
    assert isinstance(read.layers, Columns)
    assert_same(read, message)
    assert encode(read, layout) == frame
    with layer_by_layer():
        assert_same(decode(frame, layout), message)
    assert_same(reference.decode(frame, layout), message)


@needs_kernels
@relaxed
@given(uniform_messages(), st.integers(0, 2**32))
def test_both_name_the_same_error_for_a_spoiled_frame(case: tuple[Message, Layout], seed: int) -> None:
    message, layout = case
    honest = fuzzing.input_of(0, encode(message, layout))
    chance = random.Random(seed)
    for _ in range(20):
        data = bytearray(honest)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(1, len(data))] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
        if chance.random() < 0.2:
            del data[chance.randrange(2, len(data)) :]
        frame = fuzzing.frame_of(bytes(data))
        single = chance.random() < 0.5
        found = outcome(frame, layout, single)
        with layer_by_layer():
            expected = outcome(frame, layout, single)
        if isinstance(expected, Message):
            assert_same(expected, found)
        else:
            assert (type(found), str(found)) == (type(expected), str(expected))


@needs_kernels
@pytest.mark.parametrize("value_bits", [4, None])
def test_two_serial_streams_are_read_alike_and_refused_alike(value_bits: int | None) -> None:
    """Gaps are put together while the stream of values is decoded, so neither may depend on what is wrong with the
    other."""
    layout = Layout.of_sizes([9000, 16, 16, 30000, 640, 10])
    x = np.random.default_rng(4).laplace(0, 0.01, layout.size).astype(np.float32)
    # Where the largest numbers are near each other, gaps are entropy-coded.
    x *= np.where(np.arange(layout.size) % 700 < 40, np.float32(4), np.float32(1))
    settings = {"kind": "top_k", "fraction": 0.02} | ({} if value_bits is None else {"value_bits": value_bits})
    layers = compress_layers(compress.build(**settings), x, layout, PeerDraws(1, 0, 1))
    message = Message(MessageKind.GOSSIP, 3, 8, mixing_weight=1 / 3, layers=layers)
    frame, payload_bytes = encode_counted(message, layout)
    with pure():
        codes = [layer.codecs for layer in describe(frame, layout).layers]
        assert encode(message, layout) == frame
    assert [each[0] for each in codes].count("pooled") >= 2, codes
    read = decode(frame, layout)
    assert_same(read, message)
    chance = random.Random(5)
    streams = len(frame) - payload_bytes + 40
    for at in [*range(streams, len(frame) - 4, 7), *range(len(frame) - 60, len(frame) - 4)]:
        data = bytearray(frame[:-4])
        data[at] ^= 1 << chance.randrange(8)
        if at % 5 == 0:
            del data[at:]
        spoiled = bytes(data) + zlib.crc32(data).to_bytes(4, "little")
        found = outcome(spoiled, layout, True)
        with layer_by_layer():
            expected = outcome(spoiled, layout, True)
        if isinstance(expected, Message) and isinstance(found, Message):
            assert_same(found, expected)
        else:
            assert (type(found), str(found)) == (type(expected), str(expected))


def outcome(frame: bytes, layout: Layout, single: bool) -> Message | FrameError:
    try:
        return decode(frame, layout, dtype=np.float32 if single else None)
    except FrameError as error:
        return error


@needs_kernels
@relaxed
@given(st.data())
def test_residues_against_earlier_ones_are_written_alike(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3000), min_size=2, max_size=8))
    bits, rng = data.draw(st.integers(1, 8)), np.random.default_rng(data.draw(st.integers(0, 2**32)))
    spread = data.draw(st.sampled_from([0.3, 3.0, 1000.0]))
    whole_below = data.draw(st.sampled_from([0, 50]))
    layout = Layout.of_sizes(sizes)

    def message(round_: int, codes: list[np.ndarray]) -> Message:
        layers = tuple(
            Dense(np.full(c.size, 1.5, np.float32), ValueType.FLOAT32)
            if c.size < whole_below
            else Residues(0.5, bits, Rounding.DITHER, c, None)
            for c in codes
        )
        return Message(MessageKind.GOSSIP, 3, round_, layers=layers)

    first = [rng.integers(0, 2**bits, size).astype(np.uint8) for size in sizes]
    second = [((c + np.rint(rng.normal(0, spread, c.size)).astype(np.int64)) % 2**bits).astype(np.uint8) for c in first]
    before, after = message(1, first), message(2, second)
    frame = encode(after, layout, previous=before)
    with layer_by_layer():
        assert encode(after, layout, previous=before) == frame
    with pure():
        assert encode(after, layout, previous=before) == frame
    assert_same(decode(frame, layout, previous=before), after)
    received = decode(encode(before, layout), layout)
    assert_same(decode(frame, layout, previous=received), after)
    assert encode(after, layout, previous=received) == frame


@needs_kernels
def test_a_frame_that_is_refused_costs_no_more_memory_than_the_bound() -> None:
    for data in fuzzing.seeds():
        # Bits 5 and 6: allocations are counted.
        for cut in (len(data), len(data) - 1, len(data) // 2):
            fuzzing.check(bytes((data[0] & 0x8F | 0x60,)) + data[1:cut])


@needs_kernels
@pytest.mark.parametrize("which", ["indices", "codes", "scale", "size", "bits"])
def test_columns_that_break_the_contract_are_refused_like_layers(which: str) -> None:
    sizes = np.array([40, 40], np.int64)
    fields: dict[str, Any] = {
        "sizes": sizes, "forms": np.full(2, 5, np.uint8), "counts": np.array([2, 2], np.int64),
        "scalars": np.array([1.0, 2.0]), "indices": np.array([3, 9, 1, 4], np.int64),
        "codes": np.array([1, 2, 3, 4], np.uint8), "levels": (7, -7, 1, 4),
    }  # fmt: skip
    spoiled: dict[str, dict[str, Any]] = {
        "indices": {"indices": np.array([3, 3, 1, 4], np.int64)},
        "codes": {"codes": np.array([1, 16, 3, 4], np.uint8)},
        "scale": {"scalars": np.array([1.0, np.inf])},
        "size": {"sizes": np.array([40, 41], np.int64)},
        "bits": {"levels": (7, -(2**53), 1, 4)},
    }
    layout = Layout.of_sizes([40, 40])
    honest = Message(MessageKind.GOSSIP, 1, 1, layers=Columns(**fields))
    assert_same(decode(encode(honest, layout), layout), honest)
    message = Message(MessageKind.GOSSIP, 1, 1, layers=Columns(**(fields | spoiled[which])))
    with pytest.raises(LocalProtocolError):
        encode(message, layout)


def test_layers_with_other_parameters_are_no_columns() -> None:
    codes = np.zeros(3, np.uint8)
    assert columns_of((Levels(1.0, 7, -7, 1, 4, codes), Levels(1.0, 7, -7, 1, 4, codes))) is not None
    assert columns_of((Levels(1.0, 7, -7, 1, 4, codes), Levels(1.0, 7, -6, 1, 4, codes))) is None
    assert columns_of((Levels(1.0, 7, -7, 1, 9, codes),)) is None, "codes of nine bits are held in sixteen"
