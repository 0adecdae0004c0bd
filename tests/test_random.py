"""Philox streams: known answers, the derived numbers, independence of order, native and numpy alike."""

import hashlib
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import peer.random
from peer.native import available, lib
from peer.random import (
    SHARED,
    PeerDraws,
    PhiloxSource,
    Purpose,
    Stream,
    derive_key,
    stream,
)

SOURCE = Stream(key=0xE60A0D9B78774078, layer=4, round=3)


def philox4x32(counter, key):
    """Return one block of Philox 4×32-10: the definition that every implementation is compared with."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    low = 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & low, (p0 >> 32) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


@pytest.fixture(params=["numpy", "portable", "256 bit", "512 bit"])
def each_kernel(request, monkeypatch):
    """Run the test once for each implementation of Philox."""
    if request.param == "numpy":
        monkeypatch.setattr(peer.random, "lib", None)
        yield
        return
    if not available():
        pytest.skip("the native kernels were not built")
    before = lib.widest_registers
    lib.widest_registers = {"portable": 0, "256 bit": 256, "512 bit": 512}[request.param]
    yield
    lib.widest_registers = before


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_blocks_equal_the_known_answers_of_random123(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_the_key_is_blake2b_over_the_packed_names():
    packed = b"sottovoce draws\x01" + (1).to_bytes(8, "little") + (2).to_bytes(4, "little") + bytes(4)
    assert derive_key(1, 2, 0) == int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    assert derive_key(1, 2, 0) == 0xE60A0D9B78774078
    assert derive_key(1, SHARED, 2) == 0xE1FF27FC71341000


@pytest.mark.usefixtures("each_kernel")
class TestStream:
    """What a stream returns, on every implementation."""

    def test_words_are_the_blocks_in_order(self):
        expected = [philox4x32((i // 4, 4, 3, 0), (0x78774078, 0xE60A0D9B))[i % 4] for i in range(1000)]
        assert SOURCE.words(1000).tolist() == expected
        assert expected[:4] == [0x230507E9, 0xA05C5590, 0xDFBD7BDA, 0x634E54A4]

    @pytest.mark.parametrize("start", [0, 1, 3, 4, 127, 128, 1000, 2**33 - 5, 2**34 - 700])
    @pytest.mark.parametrize("size", [0, 1, 3, 4, 127, 128, 129, 700])
    def test_a_later_start_gives_the_same_words(self, start, size):
        block = [(start + i) // 4 for i in range(size)]
        expected = [philox4x32((b, 4, 3, 0), (0x78774078, 0xE60A0D9B))[(start + i) % 4] for i, b in enumerate(block)]
        assert SOURCE.words(size, start).tolist() == expected

    def test_uniforms_are_words_in_24_and_53_bits(self):
        drawn = SOURCE.words(20_000).astype(np.uint64)
        single = SOURCE.uniforms(10_000, np.float32)
        double = SOURCE.uniforms(10_000, np.float64)
        assert single.dtype == np.float32
        assert (single == (drawn[:10_000] >> np.uint64(8)) * 2.0**-24).all()
        assert (double == ((drawn[0::2] >> np.uint64(5)) * 2.0**26 + (drawn[1::2] >> np.uint64(6))) * 2.0**-53).all()

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_uniforms_of_a_part_are_that_part(self, dtype):
        whole = SOURCE.uniforms(5000, dtype)
        for start, size in ((0, 1), (1, 4999), (1023, 1026), (2048, 2048), (4999, 1)):
            assert (SOURCE.uniforms(size, dtype, start) == whole[start : start + size]).all()

    def test_integers_permutations_and_normals_are_what_they_always_were(self):
        assert SOURCE.integers(4, 1000).tolist() == [136, 873, 819, 854]
        assert SOURCE.permutation(8).tolist() == [4, 0, 5, 2, 6, 3, 1, 7]
        assert [x.hex() for x in SOURCE.normals(3).tolist()] == [
            "-0x1.1846cad2bf0edp+0",
            "0x1.253b15ad13e4bp+0",
            "0x1.d3430c4ec4f6ep-1",
        ]


def test_every_name_leads_to_numbers_of_its_own():
    names = [
        (seed, peer, purpose, round_, layer)
        for seed in (0, 1)
        for peer in (0, 1, SHARED)
        for purpose in (Purpose.ROUNDING, Purpose.SELECTION)
        for round_ in (0, 1)
        for layer in (0, 1)
    ]
    drawn = {tuple(stream(*name).words(4).tolist()) for name in names}
    assert len(drawn) == len(names)


def test_the_shared_draws_of_all_peers_are_equal_and_their_own_are_not():
    a, b = PhiloxSource(9, 0).draws(5), PhiloxSource(9, 1).draws(5)
    assert (a.shared(2, 100, np.float64) == b.shared(2, 100, np.float64)).all()
    assert (a.own(2, 100, np.float64) != b.own(2, 100, np.float64)).all()
    assert (a.words(2, 100) != b.words(2, 100)).any()
    assert (a.shared(2, 100, np.float32) != PeerDraws(9, 0, 6).shared(2, 100, np.float32)).any()


def test_the_order_of_calls_changes_nothing():
    forward, backward = PeerDraws(1, 2, 3), PeerDraws(1, 2, 3)
    first = [forward.own(layer, 50, np.float32).tolist() for layer in range(4)]
    backward.words(0, 10)
    assert [backward.own(layer, 50, np.float32).tolist() for layer in reversed(range(4))] == first[::-1]


def test_uniforms_are_uniform():
    for dtype in (np.float32, np.float64):
        drawn = np.sort(stream(3, 0, Purpose.ROUNDING).uniforms(100_000, dtype).astype(np.float64))
        assert drawn[0] >= 0.0
        assert drawn[-1] < 1.0
        # Kolmogorov–Smirnov: 1.95 / √n is passed once in a thousand seeds, and this seed is fixed.
        assert np.abs(drawn - (np.arange(100_000) + 0.5) / 100_000).max() < 1.95 / math.sqrt(100_000)


@given(bound=st.integers(1, 2**32), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=50)
def test_integers_stay_below_their_bound(bound, seed):
    drawn = stream(seed, 1, Purpose.BATCH).integers(100, bound)
    assert drawn.dtype == np.int64
    assert drawn.min() >= 0
    assert drawn.max() < bound
    w = stream(seed, 1, Purpose.BATCH).words(200).tolist()
    assert drawn.tolist() == [(bound * (w[2 * i] * 2**32 + w[2 * i + 1])) >> 64 for i in range(100)]


def test_integers_are_evenly_spread():
    counts = np.bincount(stream(0, 1, Purpose.BATCH).integers(60_000, 6), minlength=6)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 25.7  # χ² with 5 degrees of freedom, p = 1e-4


@pytest.mark.parametrize("size", [0, 1, 2, 1000])
def test_a_permutation_holds_each_number_once(size):
    order = stream(7, SHARED, Purpose.PARTITION).permutation(size)
    assert sorted(order.tolist()) == list(range(size))


def test_first_places_of_permutations_are_evenly_spread():
    counts = np.bincount([stream(7, 0, Purpose.BATCH, t).permutation(5)[0] for t in range(5000)], minlength=5)
    assert ((counts - 1000) ** 2 / 1000).sum() < 23.5  # χ² with 4 degrees of freedom, p = 1e-4


def test_the_inverse_normal_equals_the_standard_library():
    p = np.concatenate([[2.0**-53, 1e-10, 1e-5, 0.074, 0.076, 0.5, 0.925, 1 - 1e-12], np.linspace(0.001, 0.999, 999)])
    expected = [statistics.NormalDist().inv_cdf(x) for x in p.tolist()]
    np.testing.assert_allclose(peer.random._inverse_normal(p), expected, rtol=3e-15, atol=1e-16)


def test_normals_are_normal():
    z = np.sort(stream(1, 0, Purpose.INIT).normals(50_000))
    expected = np.array([0.5 * math.erfc(-x / math.sqrt(2.0)) for x in z.tolist()])
    assert np.abs(expected - (np.arange(50_000) + 0.5) / 50_000).max() < 1.95 / math.sqrt(50_000)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: stream(-1, 0, Purpose.BATCH), "run seed"),
        (lambda: stream(2**64, 0, Purpose.BATCH), "run seed"),
        (lambda: stream(0, 2**32 - 1, Purpose.BATCH), "peer's number"),
        (lambda: stream(0, 0, Purpose.BATCH, round=2**32), "round and layer"),
        (lambda: stream(0, 0, Purpose.BATCH, layer=-1), "round and layer"),
        (lambda: SOURCE.integers(1, 0), "bound"),
        (lambda: SOURCE.integers(1, 2**32 + 1), "bound"),
        (lambda: SOURCE.words(2, 2**34 - 1), "2\\*\\*34 words"),
        (lambda: SOURCE.uniforms(1, np.float64, 2**33), "2\\*\\*34 words"),
        (lambda: SOURCE.uniforms(1, np.float16), "float32 or float64"),
    ],
)
def test_names_out_of_range_are_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
