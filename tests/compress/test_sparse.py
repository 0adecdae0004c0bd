"""top_k and random_k: what is chosen, how it is written, what is promised."""

from math import comb, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer import wire
from peer.compress import build
from peer.compress import levels as levels_of
from peer.compress.base import compress_layers
from peer.compress.layout import Layout
from peer.compress.payload import Dense, Levels, Sparse, ValueType
from peer.compress.selection import count_of, largest_magnitudes, smallest_words
from peer.random import PhiloxSource
from peer.wire.message import Message, MessageKind
from tests.compress.test_decompress import decompressed
from tests.compress.vectors import AWKWARD_NAMES, GivenDraws, awkward
from tests.wire.comparing import payloads_equal

DRAWS = PhiloxSource(1, 2).draws(3)


@pytest.mark.parametrize(
    ("fraction", "size", "k"),
    [(0.25, 12, 3), (0.25, 10, 2), (0.25, 14, 4), (0.1, 4, 1), (0.001, 10, 1), (1.0, 7, 7), (0.5, 1, 1), (0.5, 5, 2)],
)
def test_k_is_rounded_to_even_and_at_least_one(fraction, size, k):
    assert count_of(fraction, size) == k


def by_sorting(v: np.ndarray, k: int) -> list[int]:
    order = sorted(range(v.size), key=lambda i: (-abs(float(v[i])), i))
    return sorted(order[:k])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", AWKWARD_NAMES)
def test_top_k_keeps_the_largest_magnitudes_and_of_equal_ones_the_first(name, dtype):
    v = awkward(dtype)[name]
    for k in {1, (v.size + 1) // 2, max(1, v.size // 50), v.size}:
        indices = largest_magnitudes(v, k)
        assert indices.dtype == np.int64
        assert indices.tolist() == by_sorting(v, k)


@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 3.5]), min_size=1, max_size=300),
    share=st.floats(0.0, 1.0),
)
def test_top_k_is_exact_where_many_magnitudes_are_equal(values, share):
    v = np.array(values, np.float32)
    k = max(1, round(share * v.size))
    assert largest_magnitudes(v, k).tolist() == by_sorting(v, k)


@pytest.mark.parametrize("pattern", ["ascending", "descending", "sample sees only small", "sample sees only large"])
def test_top_k_is_exact_where_an_even_sample_misleads(pattern):
    n, k = 40_000, 400
    v = np.arange(1, n + 1, dtype=np.float32)
    if pattern == "descending":
        v = v[::-1].copy()
    elif pattern != "ascending":
        seen = np.zeros(n, bool)
        seen[np.arange(n // 64) * n // (n // 64)] = True
        v = np.where(seen == (pattern == "sample sees only large"), v + n, v).astype(np.float32)
        if pattern == "sample sees only large":
            v[~seen] = 1.0
    expected = np.sort(np.lexsort((np.arange(n), -v))[:k])
    assert (largest_magnitudes(v, k) == expected).all()


def test_top_k_sends_exact_values_of_the_vectors_own_type():
    v = np.array([0.1, -3.0, 2.0, -0.2, 3.0, 0.0])
    payload = build("top_k", fraction=0.5).compress(v, 0, DRAWS)
    assert isinstance(payload, Sparse)
    assert payload.indices.tolist() == [1, 2, 4]
    assert payload.values.value_type is ValueType.FLOAT64
    assert decompressed(payload, np.float64).tolist() == [0.0, -3.0, 2.0, 0.0, 3.0, 0.0]


@pytest.mark.parametrize(("name", "value_type"), [("bfloat16", ValueType.BFLOAT16), ("float16", ValueType.FLOAT16)])
def test_top_k_rounds_values_to_a_shorter_float_type(name, value_type):
    v = np.random.default_rng(0).normal(size=100).astype(np.float32)
    payload = build("top_k", fraction=0.1, value_type=name).compress(v, 0, DRAWS)
    assert isinstance(payload.values, Dense)
    assert payload.values.value_type is value_type
    np.testing.assert_allclose(payload.values.values, v[payload.indices], rtol=2.0**-8)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 9, 16])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", AWKWARD_NAMES)
def test_quantized_top_k_never_ends_further_from_a_layer_than_zero(name, dtype, bits):
    v = awkward(dtype)[name]
    compressor = build("top_k", fraction=0.2, value_bits=bits)
    payload = compressor.compress(v, 0, DRAWS)
    assert isinstance(payload.values, Levels)
    assert payload.values.bits == bits
    assert payload.values.codes.max() < 2**bits
    assert payload.values.codes.dtype == (np.uint8 if bits <= 8 else np.uint16)
    exact = v.astype(np.longdouble)
    error = ((decompressed(payload, dtype).astype(np.longdouble) - exact) ** 2).sum()
    squares = (exact**2).sum()
    contraction = compressor.error_bound(v.size).contraction
    assert 0 < contraction <= 1
    if name != "denormal":
        assert error <= (1 - contraction) * squares * (1 + 1e-6) + squares * 1e-13
    assert error <= squares


@pytest.mark.parametrize("values", [[1.0, *[0.04] * 99], [1.0, *[0.07] * 99], [1.0] * 100, [1.0, *[0.0] * 99]])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("fraction", [0.01, 0.1, 1.0])
def test_the_contraction_of_quantized_top_k_holds_at_its_worst_cases(values, bits, fraction):
    v = np.array(values)
    compressor = build("top_k", fraction=fraction, value_bits=bits)
    error = ((decompressed(compressor.compress(v, 0, DRAWS), np.float64) - v) ** 2).sum()
    assert error <= (1 - compressor.error_bound(100).contraction) * (v**2).sum() + 1e-12


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", AWKWARD_NAMES)
def test_four_levels_are_the_nearest_of_the_best_size(name, dtype):
    v = awkward(dtype)[name]
    levels = levels_of.four_levels(v, 0)
    assert (levels.divisor, levels.base, levels.step, levels.bits) == (1, -3, 2, 2)
    exact, told = v.astype(np.longdouble), levels_of.level_values(levels, dtype).astype(np.longdouble)
    error, squares = ((told - exact) ** 2).sum(), (exact**2).sum()
    assert error <= squares * (1 + 1e-12)
    if name != "denormal":
        for scale in levels.scale * np.linspace(0.1, 5.0, 99, dtype=np.longdouble):
            sizes = np.where(np.abs(exact) < 2 * scale, scale, 3 * scale)
            assert error <= ((sizes - np.abs(exact)) ** 2).sum() * (1 + 1e-6) + squares * 1e-13


@pytest.mark.parametrize("freedom", [2, 3])
def test_four_levels_say_something_of_all_that_was_chosen(freedom):
    """Of heavy tails, −s, 0 and s round much of what top-k chose to zero, and its index is sent for nothing."""
    n, layout = 200_000, Layout.of_sizes([200_000])
    v = np.random.default_rng(0).standard_t(freedom, n).astype(np.float32)
    squares, errors, lengths, zeros = float((v.astype(np.float64) ** 2).sum()), [], [], []
    for four in (False, True):
        payload = build("top_k", fraction=0.03, value_bits=2, four_levels=four).compress(v, 0, DRAWS)
        told = decompressed(payload, np.float64)
        errors.append(float(((told - v) ** 2).sum()) / squares)
        lengths.append(8 * len(wire.encode(Message(MessageKind.GOSSIP, 0, 1, layers=(payload,)), layout)))
        zeros.append(1.0 - np.count_nonzero(told) / payload.indices.size)
    assert zeros[0] > 0.3
    assert zeros[1] == 0.0
    assert errors[1] < 0.85 * errors[0]
    shares = np.bincount(payload.values.codes) / payload.indices.size
    k, entropy = payload.indices.size, -(shares * np.log2(shares)).sum()
    assert lengths[1] / k < log2(comb(n, k)) / k + entropy + 0.15


def test_levels_follow_the_bulk_of_a_heavy_tail():
    v = np.concatenate([np.linspace(1.0, 2.0, 999), [1000.0]])
    v[::2] *= -1
    payload = build("top_k", fraction=1.0, value_bits=8).compress(v, 0, DRAWS)
    errors = np.abs(decompressed(payload, np.float64) - v)
    # With 1000 as the end of the scale a step is 7.9, and everything else would become 0.
    assert payload.values.scale == 1000.0
    payload = build("top_k", fraction=1.0, value_bits=8).compress(v[:-1], 0, DRAWS)
    assert np.abs(decompressed(payload, np.float64) - v[:-1]).max() < 0.01
    spread = np.concatenate([v[:-1], [20.0]])
    payload = build("top_k", fraction=1.0, value_bits=4).compress(spread, 0, DRAWS)
    assert payload.values.scale < 20.0
    assert ((decompressed(payload, np.float64) - spread) ** 2).sum() < 0.3 * (
        (np.rint(spread / 20 * 7) * 20 / 7 - spread) ** 2
    ).sum()
    assert errors.max() <= 2.0


def test_random_k_sends_the_coordinates_with_the_smallest_words():
    drawn = np.array([7, 3, 2**32 - 1, 3, 0, 3, 9], np.uint32)
    v = np.arange(1.0, 8.0)
    payload = build("random_k", fraction=0.43).compress(v, 0, GivenDraws(drawn_words=drawn))
    assert payload.indices.tolist() == [1, 3, 4]
    assert payload.values.values.tolist() == [2.0, 4.0, 5.0]


@given(seed=st.integers(0, 1000), n=st.integers(1, 5000), share=st.floats(0.0, 1.0), repeats=st.booleans())
@settings(max_examples=50)
def test_smallest_words_are_exact(seed, n, share, repeats):
    drawn = np.random.default_rng(seed).integers(0, 20 if repeats else 2**32, n, dtype=np.uint32)
    k = max(1, round(share * n))
    assert (smallest_words(drawn, k) == np.sort(np.argsort(drawn, kind="stable")[:k])).all()


def test_random_k_chooses_every_coordinate_equally_often():
    v = np.ones(20, np.float32)
    compressor = build("random_k", fraction=0.25)
    counts = np.zeros(20)
    for t in range(4000):
        counts[compressor.compress(v, 0, PhiloxSource(0, 0).draws(t)).indices] += 1
    # 4000 draws of probability ¼ each: standard deviation 27.
    assert np.abs(counts - 1000).max() < 5 * 27.4


def test_unbiased_random_k_scales_by_size_over_k():
    v = np.arange(1.0, 9.0)
    drawn = np.arange(8, dtype=np.uint32)
    payload = build("random_k", fraction=0.25, unbiased=True).compress(v, 0, GivenDraws(drawn_words=drawn))
    assert decompressed(payload, np.float64).tolist() == [4.0, 8.0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("settings_", [{"fraction": 0.01, "value_bits": 4}, {"fraction": 0.3}, {"fraction": 1.0}])
def test_nominal_bits_count_values_and_the_choice_of_indices(settings_):
    size = 1000
    compressor = build("top_k", **settings_)
    payload_bits = compressor.bits_per_value(size) * size
    k = count_of(settings_["fraction"], size)

    assert payload_bits == pytest.approx(k * settings_.get("value_bits", 32) + log2(comb(size, k)), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("fraction", [0.001, 0.1, 1.0])
def test_top_k_of_all_layers_at_once_is_that_of_each(fraction: float) -> None:
    layout = Layout.of_sizes([1, 300, 7, 2500, 64])
    v = np.random.default_rng(4).standard_normal(layout.size).astype(np.float32)
    v[10:200] = v[10]
    compressor = build("top_k", fraction=fraction)
    each = [compressor.compress(v[part], layer, DRAWS) for layer, part in enumerate(layout.slices)]
    for one, other in zip(compress_layers(compressor, v, layout, DRAWS), each, strict=True):
        assert payloads_equal(one, other)


def test_a_layer_that_is_not_finite_is_named_among_all() -> None:
    layout = Layout.of_sizes([5, 5, 5])
    v = np.ones(15, np.float32)
    v[12] = np.nan
    with pytest.raises(ValueError, match="layer 2"):
        compress_layers(build("top_k", fraction=0.2), v, layout, DRAWS)
