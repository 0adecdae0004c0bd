"""From payloads to numbers: dense, added, sparse, refused."""

import numpy as np
import pytest

from peer import wire
from peer.compress import build, decompress, float_types
from peer.compress.base import compress_layers
from peer.compress.decompress import (
    add_all_decompressed_,
    add_decompressed_,
    add_kept_,
    add_sum_decompressed_,
    decompress_layers,
)
from peer.compress.float_types import floats_of, store_
from peer.compress.layout import Layout
from peer.compress.payload import Dense, Levels, MoreBits, Residues, Rounding, Sparse, ValueType, WholeIntegers
from peer.errors import RemoteProtocolError
from peer.random import PhiloxSource, Purpose, stream
from peer.wire.message import Message, MessageKind
from tests.compress.test_bias_and_bounds import ALL
from tests.compress.vectors import decompressed

LAYOUT = Layout.of_sizes([700, 1, 64, 3000])

NONE, TOP_K = build("none"), build("top_k", fraction=0.05)


@pytest.mark.parametrize("weight", [1.0, 0.25, -0.3, 1 / 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("compressor", [*ALL, build("top_k", fraction=0.05, value_bits=4)], ids=str)
def test_adding_a_payload_gives_the_bits_of_adding_its_values(compressor, dtype, weight):
    rng = np.random.default_rng(0)
    v, start = (rng.normal(size=LAYOUT.size).astype(dtype) for _ in range(2))
    payload = compress_layers(compressor, v, LAYOUT, PhiloxSource(1, 2).draws(0))
    values = decompress_layers(payload, LAYOUT, dtype)
    assert values.dtype == dtype
    expected = start + values if weight == 1.0 else start + np.dtype(dtype).type(weight) * values
    added = start.copy()
    add_decompressed_(added, payload, LAYOUT, weight)
    assert added.dtype == dtype
    assert added.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("compressors", [(NONE, NONE, NONE), (NONE, TOP_K), (TOP_K,), ()], ids=len)
def test_adding_all_payloads_gives_the_bits_of_adding_one_by_one(compressors, dtype):
    layout = Layout.of_sizes([300_000, 3, 131_072])
    rng = np.random.default_rng(1)
    draws = PhiloxSource(1, 2).draws(0)
    terms = [
        (compress_layers(compressor, rng.normal(size=layout.size).astype(dtype), layout, draws), scale)
        for compressor, scale in zip(compressors, (-0.5, 1.0, 1 / 3), strict=False)
    ]
    start = rng.normal(size=layout.size).astype(dtype)
    together, one_by_one = start.copy(), start.copy()
    add_all_decompressed_(together, terms, layout)
    for payload, scale in terms:
        add_decompressed_(one_by_one, payload, layout, scale)
    assert together.tobytes() == one_by_one.tobytes()

    payloads = [payload for payload, _ in terms]
    total, summed = np.zeros_like(start), start.copy()
    for payload in payloads:
        add_decompressed_(total, payload, layout)
    add_sum_decompressed_(summed, payloads, layout, -1 / 3)
    assert summed.tobytes() == (start + np.dtype(dtype).type(-1 / 3) * total).tobytes()


def test_adding_all_refuses_a_payload_of_another_model_before_it_adds_any():
    layer = Dense(np.ones(4, np.float32), ValueType.FLOAT32)
    out = np.zeros(4, np.float32)
    with pytest.raises(RemoteProtocolError, match="does not have the shape"):
        add_all_decompressed_(out, [((layer,), 1.0), ((layer, layer), 1.0)], Layout.of_sizes([4]))
    assert not out.any()


def test_a_sparse_layer_touches_only_what_it_holds():
    out = np.array([-0.0, 1.0, np.nan, 2.0], np.float32)
    layer = Sparse(4, np.array([1, 3]), Dense(np.array([0.5, -2.0], np.float32), ValueType.FLOAT32))
    add_decompressed_(out, (layer,), Layout.of_sizes([4]), 2.0)
    assert out[[1, 3]].tolist() == [2.0, -2.0]
    assert np.signbit(out[0])
    assert np.isnan(out[2])


def test_indices_of_another_type_are_read_as_they_are():
    layer = Sparse(4, np.array([1, 3], np.int32), Dense(np.array([0.5, -2.0], np.float32), ValueType.FLOAT32))
    out = np.zeros(4, np.float32)
    add_decompressed_(out, (layer,), Layout.of_sizes([4]))
    assert out.tolist() == [0.0, 0.5, 0.0, -2.0]


def test_sums_go_to_strided_vectors_too():
    memory = np.zeros(20, np.float32)
    layer = Levels(0.5, 1, -1, 1, 2, np.array([0, 1, 2] * 3 + [0], np.uint8))
    add_decompressed_(memory[::2], (layer,), Layout.of_sizes([10]), 3.0)
    assert memory[::2].tolist() == [-1.5, 0.0, 1.5] * 3 + [-1.5]
    assert not memory[1::2].any()


@pytest.mark.parametrize(
    "payload",
    [
        Residues(1.0, 4, Rounding.NEAREST, np.zeros(4, np.uint8), None),
        MoreBits(4, 2, np.zeros(4, np.uint8)),
        WholeIntegers(np.zeros(4, np.int64)),
    ],
)
def test_what_needs_a_reference_cannot_be_decompressed_without(payload):
    with pytest.raises(TypeError, match="receiver's own vector"):
        decompressed(payload, np.float32)


@pytest.mark.parametrize("indices", [[-1, 2], [1, 4], [2, 2**40], [1, -1]])
def test_indices_outside_of_the_layer_are_refused(indices):
    layer = Sparse(4, np.array(indices), Dense(np.ones(2, np.float32), ValueType.FLOAT32))
    for out in (np.zeros(4, np.float32), np.zeros(4)):
        with pytest.raises(RemoteProtocolError):
            add_decompressed_(out, (layer,), Layout.of_sizes([4]))
    with pytest.raises(RemoteProtocolError):
        decompressed(layer, np.float32)


def test_an_index_that_hides_between_good_ends_reaches_no_foreign_memory():
    layer = Sparse(4, np.array([0, 2**40, 3]), Dense(np.ones(3, np.float32), ValueType.FLOAT32))
    with pytest.raises((RemoteProtocolError, IndexError)):
        add_decompressed_(np.zeros(4, np.float32), (layer,), Layout.of_sizes([4]))


def test_payloads_of_another_shape_are_refused():
    layer = Dense(np.ones(4, np.float32), ValueType.FLOAT32)
    for payload in ((), (layer, layer), (Dense(np.ones(3, np.float32), ValueType.FLOAT32),)):
        with pytest.raises(RemoteProtocolError, match="shape of this model"):
            add_decompressed_(np.zeros(4, np.float32), payload, Layout.of_sizes([4]))
        with pytest.raises(RemoteProtocolError, match="shape of this model"):
            decompress_layers(payload, Layout.of_sizes([4]), np.float32)


def test_values_beyond_the_type_are_refused():
    layer = Dense(np.array([1e300]), ValueType.FLOAT64)
    with pytest.raises(RemoteProtocolError, match="range of float32"):
        decompressed(layer, np.float32)
    assert decompressed(layer, np.float64)[0] == 1e300


def in_bfloat16(values):
    kept = np.zeros(values.size, np.uint16)
    store_(kept, values)
    return kept


@pytest.mark.parametrize("weight", [1.0, -0.3])
@pytest.mark.parametrize("compressor", [*ALL, build("top_k", fraction=0.05, value_bits=4)], ids=str)
def test_in_bfloat16_both_ends_round_what_a_payload_names_and_nothing_else(compressor, weight, monkeypatch):
    rng = np.random.default_rng(0)
    v, start = (rng.normal(size=LAYOUT.size).astype(np.float32) for _ in range(2))
    before, draws = in_bfloat16(start), stream(3, 1, Purpose.COPY, 7)
    payload = compress_layers(compressor, v, LAYOUT, PhiloxSource(1, 2).draws(0))
    message = wire.encode(Message(MessageKind.GOSSIP, 1, 7, layers=payload), LAYOUT)
    added = before.copy()
    add_kept_(added, payload, LAYOUT, draws, weight)
    exact = floats_of(before)
    add_decompressed_(exact, payload, LAYOUT, weight)
    for layer, (part, said) in enumerate(zip(LAYOUT.slices, payload, strict=True)):
        named = said.indices if isinstance(said, Sparse) else np.arange(part.stop - part.start)
        halves = stream(3, 1, Purpose.COPY, 7, layer).words(named.size).astype("<u4").view("<u2")[: named.size]
        expected = before[part].copy()
        expected[named] = (exact[part][named].view(np.uint32) + halves) >> np.uint32(16)
        assert added[part].tobytes() == expected.tobytes()
    for module in (decompress, float_types):
        monkeypatch.setattr(module, "KEPT_AT_ONCE", 6)
    again = before.copy()
    add_kept_(again, wire.decode(message, LAYOUT).layers, LAYOUT, draws, weight)
    assert again.tobytes() == added.tobytes()


def test_the_mean_of_what_is_stored_in_bfloat16_is_the_number():
    rng, rounds = np.random.default_rng(0), 4000
    v = (rng.normal(size=101) * 10.0 ** rng.uniform(-30, 30, 101)).astype(np.float32)
    stored = np.zeros((rounds, v.size), np.uint16)
    for t, row in enumerate(stored):
        store_(row, v, stream(1, 0, Purpose.COPY, t))
    errors = np.stack([floats_of(row) for row in stored]).astype(np.float64) / v - 1.0
    assert np.abs(errors).max() < 2.0**-7
    assert errors.var(axis=0).max() <= 2.0**-16 * 1.05
    assert np.abs(errors.mean(axis=0)).max() < 5 * 2.0**-8 / np.sqrt(rounds)
    # What bfloat16 holds stays as it is.
    on_grid = stored[0].copy()
    store_(on_grid, floats_of(stored[0]), stream(1, 0, Purpose.COPY, 9))
    assert on_grid.tobytes() == stored[0].tobytes()


def test_small_additions_are_not_swallowed_as_they_are_by_rounding_to_nearest():
    layout, small = Layout.of_sizes([1000]), (Dense(np.full(1000, 2.0**-12, np.float32), ValueType.FLOAT32),)
    stochastic, nearest = (in_bfloat16(np.full(1000, 1.5, np.float32)) for _ in range(2))
    for t in range(256):
        add_kept_(stochastic, small, layout, stream(1, 0, Purpose.COPY, t))
        store_(nearest, floats_of(nearest) + small[0].values)
    assert (floats_of(nearest) == 1.5).all()
    # 256 · 2⁻¹², in steps of 2⁻⁷, each number up to its own luck.
    assert floats_of(stochastic).mean() - 1.5 == pytest.approx(2.0**-4, rel=0.03)
