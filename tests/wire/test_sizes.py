"""What messages cost: headers, indices, codes, and memory while they are written and read."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from peer.compress.layout import Layout
from peer.compress.payload import Dense, LayerPayload, Levels, Payload, Residues, Rounding, Sparse, ValueType
from peer.wire import Message, MessageKind, allocation_bound, decode, encode, entropy_bound_bits
from peer.wire.entropy_bound import log2_choose
from peer.wire.plans import entropy_of
from tools.frame_report import describe

SMALL_JOB = Layout.of_sizes([8192, 128, 1280, 10])


def gossip(*layers: LayerPayload) -> Message:
    return Message(MessageKind.GOSSIP, 7, 1234, mixing_weight=1 / 3, push_weight=0.8765, layers=layers)


def kept(size: int, count: int, bits: int | None, rng: np.random.Generator) -> Sparse:
    where = np.sort(rng.choice(size, count, replace=False))
    if bits is None:
        return Sparse(size, where, Dense(rng.standard_normal(count).astype(np.float32), ValueType.FLOAT32))
    codes = rng.integers(0, 2**bits - 1, count).astype(np.uint8)
    top = 2 ** (bits - 1) - 1
    return Sparse(size, where, Levels(float(np.float32(0.1)), top, -top, 1, bits, codes))


@pytest.mark.parametrize("seed", range(5))
def test_two_percent_of_a_small_model_in_four_bits_fits_345_bytes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers = tuple(kept(size, max(1, round(0.02 * size)), 4, rng) for size in SMALL_JOB.sizes)
    assert len(encode(gossip(*layers), SMALL_JOB)) <= 345


def test_a_message_without_layers_takes_a_dozen_bytes() -> None:
    frame = encode(Message(MessageKind.NOTHING, 7, 1234, mixing_weight=0.25), SMALL_JOB)
    assert len(frame) <= 16


@pytest.mark.parametrize("size", [10, 300, 20_000])
def test_headers_and_checksum_stay_under_64_bytes_and_8_a_layer(size: int) -> None:
    rng = np.random.default_rng(1)
    layout = Layout.of_sizes([size] * 40)
    count = max(1, size // 50)
    codes = rng.integers(0, 256, size).astype(np.uint8)
    payloads: list[Payload] = [
        tuple(kept(size, count, 4, rng) for _ in range(40)),
        tuple(kept(size, count, None, rng) for _ in range(40)),
        tuple(Residues(1.5 + i, 8, Rounding.DITHER, codes, i) for i in range(40)),
        tuple(Levels(1.5, 255, -255, 1, 8, codes) for _ in range(40)),
        tuple(Dense(rng.standard_normal(size).astype(np.float32), ValueType.FLOAT32) for _ in range(40)),
    ]
    for layers in payloads:
        report = describe(encode(gossip(*layers), layout), layout)
        assert report.header_bytes + report.checksum_bytes <= 32
        assert report.overhead_bytes <= 64 + 4 * layout.num_layers


@pytest.mark.parametrize("share", [0.1, 0.01, 0.001])
def test_scattered_indices_cost_within_three_percent_of_what_they_must(share: float) -> None:
    size = 1_000_000
    count = round(share * size)
    layout = Layout.of_sizes([size])
    report = describe(encode(gossip(kept(size, count, 4, np.random.default_rng(2))), layout), layout)
    assert 8 * report.index_bytes <= 1.03 * log2_choose(size, count)


def test_clustered_indices_cost_less_than_scattered_ones_must() -> None:
    size, rng = 200_000, np.random.default_rng(3)
    clusters = np.repeat(rng.integers(0, size - 2000, 40), 50) + rng.integers(0, 300, 2000)
    where = np.unique(clusters)
    layer = Sparse(size, where, Levels(1.0, 1, -1, 2, 1, np.zeros(where.size, np.uint8)))
    layout = Layout.of_sizes([size])
    report = describe(encode(gossip(layer), layout), layout)
    assert 8 * report.index_bytes < 0.85 * log2_choose(size, where.size)


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("spread", [0.01, 0.08, 10.0])
def test_codes_cost_within_three_percent_of_their_entropy_or_their_bits(bits: int, spread: float) -> None:
    size, rng = 200_000, np.random.default_rng(4)
    middle = 2 ** (bits - 1)
    codes = np.rint(rng.normal(middle, max(spread * 2**bits, 0.4), size)).astype(np.int64) % 2**bits
    layer = Residues(1.0, bits, Rounding.NEAREST, codes.astype(np.uint8 if bits <= 8 else np.uint16), None)
    layout = Layout.of_sizes([size])
    message = gossip(layer)
    report = describe(encode(message, layout), layout)
    assert report.bound_bits == entropy_bound_bits(message)
    assert 8 * report.value_bytes <= 1.03 * (report.bound_bits - 32)


def test_the_codes_of_many_small_layers_share_what_they_can() -> None:
    rng = np.random.default_rng(5)
    layout = Layout.of_sizes([20] * 100)
    layers = [Levels(1.0, 1, -1, 1, 2, rng.choice(3, 20, p=[0.1, 0.8, 0.1]).astype(np.uint8)) for _ in range(100)]
    report = describe(encode(gossip(*layers), layout), layout)
    assert 8 * report.pooled_value_bytes <= 1.1 * (report.bound_bits - 32 * 100)
    assert {codec for layer in report.layers for codec in layer.codecs} == {"pooled"}


def test_layers_that_are_unlike_each_other_share_a_stream_but_not_a_table() -> None:
    rng = np.random.default_rng(8)
    layout = Layout.of_sizes([900] * 40)
    layers = []
    for number in range(40):
        codes = np.clip(np.rint(rng.normal(128, (0.3, 2.0, 30.0)[number % 3], 900)), 0, 255)
        layers.append(Residues(1.0, 8, Rounding.NEAREST, codes.astype(np.uint8), None))
    report = describe(encode(gossip(*layers), layout), layout)
    everything = np.concatenate([layer.residues for layer in layers])
    one_table = everything.size * entropy_of(np.bincount(everything))
    assert 8 * report.pooled_value_bytes < 1.07 * (report.bound_bits - 32 * 40)
    assert 8 * report.pooled_value_bytes < 0.85 * one_table


def test_the_gaps_of_many_small_layers_share_a_table() -> None:
    rng = np.random.default_rng(9)
    layout = Layout.of_sizes([900] * 60)
    layers = [kept(900, 12, 4, rng) for _ in range(60)]
    report = describe(encode(gossip(*layers), layout), layout)
    assert 8 * report.index_bytes <= 1.05 * 60 * log2_choose(900, 12)


def test_a_report_accounts_for_every_byte() -> None:
    rng = np.random.default_rng(6)
    layout = Layout.of_sizes([3000, 50, 7, 900])
    layers = (
        kept(3000, 100, 4, rng),
        Residues(1.0, 5, Rounding.DITHER, rng.integers(0, 32, 50).astype(np.uint8), 99),
        Dense(np.ones(7, np.float32), ValueType.FLOAT32),
        kept(900, 3, 4, rng),
    )
    frame = encode(gossip(*layers), layout)
    report = describe(frame, layout)
    in_layers = sum(layer.header_bytes for layer in report.layers)
    assert report.header_bytes + in_layers + report.payload_bytes + report.checksum_bytes == len(frame)
    assert [layer.payload for layer in report.layers] == ["Sparse", "Residues", "Dense", "Sparse"]
    assert report.layers[1].check_bytes == 8
    assert [layer.scale_bytes for layer in report.layers] == [4, 4, 0, 4]
    assert report.layers[2].codecs == ("pooled",)
    assert report.pooled_value_bytes >= 28


def _payload_bytes(layer: LayerPayload) -> int:
    if isinstance(layer, Sparse):
        return layer.indices.nbytes + _payload_bytes(layer.values)
    if isinstance(layer, Dense):
        return layer.values.nbytes
    assert isinstance(layer, (Levels, Residues))
    return layer.codes.nbytes if isinstance(layer, Levels) else layer.residues.nbytes


def _large() -> dict[str, LayerPayload]:
    rng, size = np.random.default_rng(7), 1_000_000
    heap = np.clip(np.rint(rng.normal(128, 12, size)), 0, 255).astype(np.uint8)
    wide = np.clip(np.rint(rng.normal(256, 30, size)), 0, 511).astype(np.uint16)
    return {
        "uniform residues": Residues(1.0, 8, Rounding.NEAREST, rng.integers(0, 256, size).astype(np.uint8), None),
        "heaped levels": Levels(1.0, 1, 0, 1, 8, heap),
        "heaped levels of nine bits": Levels(1.0, 1, 0, 1, 9, wide),
        "constant levels": Levels(1.0, 1, 0, 1, 8, np.full(size, 7, np.uint8)),
        "one percent": kept(size, size // 100, 4, rng),
        "all in float32": Dense(rng.standard_normal(size).astype(np.float32), ValueType.FLOAT32),
        "all in bfloat16": Dense(
            (rng.standard_normal(size).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
            ValueType.BFLOAT16,
        ),
        "all in float64": Dense(rng.standard_normal(size), ValueType.FLOAT64),
    }


LARGE = _large()


@pytest.mark.parametrize("name", LARGE)
def test_writing_allocates_at_most_twice_the_message_and_reading_what_it_states(name: str, implementation: str) -> None:
    layer = LARGE[name]
    layout = Layout.of_sizes([1_000_000])
    message = gossip(layer)
    tracemalloc.start()
    frame = encode(message, layout)
    writing = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    decode(frame, layout)
    reading = tracemalloc.get_traced_memory()[1] - held
    tracemalloc.stop()
    # Four mebibytes for what does not grow with the message: a sample, its histogram, pieces in 64-bit integers.
    assert writing <= 2 * _payload_bytes(layer) + (4 << 20)
    assert reading <= allocation_bound(layout)
