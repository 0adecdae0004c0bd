"""The claims of every compressor: unbiased where it says so, within its bounds, equal under equal seeds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from peer.compress import build
from peer.compress.base import compress_layers
from peer.compress.decompress import decompress_layers
from peer.compress.layout import Layout
from peer.random import PhiloxSource
from tests.compress.vectors import awkward, decompressed
from tests.wire.comparing import payloads_equal

UNBIASED = [
    build("none"),
    build("random_k", fraction=0.3, unbiased=True),
    build("random_k", fraction=0.3, unbiased=True, value_bits=3),
    *(build("qsgd", bits=bits) for bits in (1, 2, 4, 8)),
    build("grid", step=0.3),
    build("ternary"),
]
BIASED = [
    build("none", value_type="bfloat16"),
    build("top_k", fraction=0.1),
    build("top_k", fraction=0.1, value_type="float16"),
    build("random_k", fraction=0.1),
    build("top_k", fraction=0.1, value_bits=2, four_levels=True),
    build("random_k", fraction=0.2, value_bits=2, four_levels=True),
    *(build("qsgd", bits=bits, unbiased=False) for bits in (1, 2, 4, 8)),
    build("grid", step=0.3, rounding="nearest"),
    build("grid", bits=4, range=2.0),
    build("sign"),
]
ALL = UNBIASED + BIASED


@pytest.mark.parametrize("compressor", UNBIASED, ids=str)
def test_the_mean_of_many_rounds_is_the_vector(compressor):
    assert compressor.unbiased
    # No values near 0: their rare events would not have shown in this many rounds, and not in the measured variance.
    rng = np.random.default_rng(0)
    v = rng.uniform(0.3, 2.0, 64) * rng.choice([-1.0, 1.0], 64)
    rounds = 3000
    values = np.stack(
        [decompressed(compressor.compress(v, 0, PhiloxSource(1, 0).draws(t)), v.dtype) for t in range(rounds)]
    )
    # Of 64 coordinates within six standard errors of the mean, measured: a false alarm has odds of 1e-7.
    allowed = 6 * values.std(axis=0) / np.sqrt(rounds) + 1e-12
    assert (np.abs(values.mean(axis=0) - v) < allowed).all()


@pytest.mark.parametrize("compressor", BIASED, ids=str)
def test_biased_compressors_say_so(compressor):
    assert not compressor.unbiased


@pytest.mark.parametrize("compressor", ALL, ids=str)
@pytest.mark.parametrize("shape", ["normal", "spike", "flat"])
def test_the_mean_squared_error_keeps_the_promised_bounds(compressor, shape):
    rng = np.random.default_rng(1)
    v = {"normal": rng.normal(size=50), "spike": np.r_[5.0, np.full(49, 0.8)], "flat": np.ones(50)}[shape]
    errors = [
        ((decompressed(compressor.compress(v, 0, PhiloxSource(1, 0).draws(t)), v.dtype) - v) ** 2).sum()
        for t in range(1000)
    ]
    relative = np.mean(errors) / (v**2).sum()
    slack = 5 * np.std(errors) / np.sqrt(1000) / (v**2).sum() + 1e-12
    bound = compressor.error_bound(v.size)
    if bound.variance is not None:
        assert relative <= bound.variance + slack
    if bound.contraction is not None:
        assert relative <= 1 - bound.contraction + slack
    if bound.absolute is not None:
        assert max(errors) <= v.size * bound.absolute**2 + 1e-12


def test_the_variance_bounds_are_reached():
    """A bound that nothing comes near would be worth little: the worst cases of ternary and unbiased random_k."""
    d = 50
    worst = np.full(d, 1 / (np.sqrt(d) + 1))
    worst[0] = 1.0
    for compressor in (build("ternary"), build("random_k", fraction=0.1, unbiased=True)):
        errors = [
            ((decompressed(compressor.compress(worst, 0, PhiloxSource(2, 0).draws(t)), np.float64) - worst) ** 2).sum()
            for t in range(4000)
        ]
        relative = np.mean(errors) / (worst**2).sum()
        assert relative == pytest.approx(compressor.error_bound(d).variance, rel=0.1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("compressor", ALL, ids=str)
def test_awkward_vectors_are_compressed_without_change_to_them(compressor, dtype):
    for name, v in awkward(dtype).items():
        before = v.copy()
        payload = compressor.compress(v, 0, PhiloxSource(3, 1).draws(0))
        values = decompressed(payload, dtype)
        assert v.tobytes() == before.tobytes(), name
        assert (values.dtype, values.shape) == (v.dtype, v.shape), name
        assert np.isfinite(values).all(), name
        assert payloads_equal(payload, compressor.compress(before, 0, PhiloxSource(3, 1).draws(0))), name


@pytest.mark.parametrize("compressor", [c for c in UNBIASED if c.kind != "none"], ids=str)
def test_other_rounds_layers_and_peers_draw_other_numbers(compressor):
    v = np.random.default_rng(0).normal(size=500).astype(np.float32)
    first = compressor.compress(v, 0, PhiloxSource(1, 0).draws(0))
    assert not payloads_equal(first, compressor.compress(v, 0, PhiloxSource(1, 0).draws(1)))
    assert not payloads_equal(first, compressor.compress(v, 1, PhiloxSource(1, 0).draws(0)))
    assert not payloads_equal(first, compressor.compress(v, 0, PhiloxSource(1, 1).draws(0)))
    assert not payloads_equal(first, compressor.compress(v, 0, PhiloxSource(2, 0).draws(0)))


@pytest.mark.parametrize("compressor", ALL, ids=str)
def test_layers_are_compressed_one_by_one_in_any_order(compressor):
    layout = Layout.of_sizes([40, 3, 200])
    v = np.random.default_rng(0).normal(size=layout.size).astype(np.float32)
    draws = PhiloxSource(1, 0).draws(7)
    payload = compress_layers(compressor, v, layout, draws)
    for layer in (2, 0, 1):
        assert payloads_equal(payload[layer], compressor.compress(v[layout.slices[layer]], layer, draws))
    whole = compress_layers(compressor, v, layout, draws, whole_below=4)
    assert (decompress_layers(whole, layout, np.float32)[layout.slices[1]] == v[layout.slices[1]]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("compressor", [*ALL, build("modulo", bits=4, theta=1.0)], ids=str)
def test_a_value_that_is_not_finite_is_refused_and_the_layer_named(compressor, dtype, bad):
    for size, at in ((1, 0), (3000, 2999)):
        v = np.ones(size, dtype)
        v[at] = bad
        with pytest.raises(ValueError, match="layer 7"):
            compressor.compress(v, 7, PhiloxSource(1, 0).draws(0))


@given(
    v=hnp.arrays(np.float32, st.integers(1, 80), elements=st.floats(-(2.0**60), 2.0**60, width=32)),
    number=st.integers(0, len(ALL) - 1),
    seed=st.integers(0, 100),
)
@settings(max_examples=300, deadline=None)
def test_any_vector_stays_within_bounds_that_hold_for_every_draw(v, number, seed):
    compressor = ALL[number]
    values = decompressed(compressor.compress(v, 0, PhiloxSource(seed, 0).draws(0)), np.float32).astype(np.float64)
    bound = compressor.error_bound(v.size)
    if bound.absolute is not None:
        assert (np.abs(values - v) <= bound.absolute + np.abs(v) * 2.0**-22).all()
    # float16 is left out: its bound holds in its normal range only, far smaller than float32's.
    if compressor.kind in ("top_k", "sign") and getattr(compressor, "value_type", None) is None:
        squares = (v.astype(np.float64) ** 2).sum()
        assert ((values - v) ** 2).sum() <= (1 - bound.contraction) * squares * (1 + 1e-6) + 1e-70
