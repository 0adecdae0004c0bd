"""Frames without entropy coding: any reader reads them, and all writers write the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from peer import native
from peer.compress.layout import Layout
from peer.compress.payload import Dense, Levels, Residues, Rounding, Sparse, ValueType
from peer.wire import Message, MessageKind, decode, encode, max_frame_bytes
from tests.wire import reference
from tests.wire.comparing import assert_same, pure
from tests.wire.strategies import messages
from tests.wire.test_section_columns import layer_by_layer, uniform_messages
from tools.frame_report import describe

relaxed = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@relaxed
@given(messages())
def test_every_message_comes_back_as_it_was(case: tuple[Message, Layout]) -> None:
    message, layout = case
    frame = encode(message, layout, packed=True)
    assert len(frame) <= max_frame_bytes(layout)
    assert_same(decode(frame, layout), message)
    assert_same(reference.decode(frame, layout), message)
    codecs = {codec for layer in describe(frame, layout).layers for codec in layer.codecs}
    assert not codecs & {"entropy", "zstd"}


@pytest.mark.skipif(native.lib is None, reason="the native kernels were not built")
@relaxed
@given(uniform_messages())
def test_all_at_once_and_layer_by_layer_write_the_same_bytes(case: tuple[Message, Layout]) -> None:
    message, layout = case
    frame = encode(message, layout, packed=True)
    with layer_by_layer():
        assert encode(message, layout, packed=True) == frame
    with pure():
        assert encode(message, layout, packed=True) == frame


@pytest.mark.parametrize("sizes", [[100_000], [100_000, 3], [40, 3]])
def test_a_whole_model_takes_its_own_bytes(sizes: list[int], implementation: str) -> None:
    rng = np.random.default_rng(1)
    layers = tuple(Dense(rng.normal(0, 0.01, size).astype(np.float32), ValueType.FLOAT32) for size in sizes)
    message, layout = Message(MessageKind.GOSSIP, 1, 2, layers=layers), Layout.of_sizes(sizes)
    frame = encode(message, layout, packed=True)
    assert 4 * sum(sizes) <= len(frame) <= 4 * sum(sizes) + 32
    assert_same(decode(frame, layout), message)


def test_codes_and_kept_values_are_packed_and_nothing_is_coded_against_an_earlier_message(implementation: str) -> None:
    codes = np.full(20_000, 3, np.uint8)
    layout = Layout.of_sizes([20_000, 20_000])
    residues = Residues(0.5, 8, Rounding.NEAREST, codes, None)
    earlier = Message(MessageKind.GOSSIP, 1, 1, layers=(residues, residues))
    message = Message(MessageKind.GOSSIP, 1, 2, layers=(residues, residues))
    frame = encode(message, layout, previous=earlier, packed=True)
    assert frame == encode(message, layout, packed=True)
    assert len(frame) >= 40_000 > 20 * len(encode(message, layout, previous=earlier))
    where = np.arange(0, 20_000, 40)
    sparse = Sparse(20_000, where, Levels(1.0, 7, -7, 1, 4, np.full(where.size, 7, np.uint8)))
    frame = encode(Message(MessageKind.GOSSIP, 1, 1, layers=(sparse, sparse)), layout, packed=True)
    assert len(frame) > 2 * where.size // 2
    assert {layer.codecs[0].partition("-")[0] for layer in describe(frame, layout).layers} == {"rice"}
