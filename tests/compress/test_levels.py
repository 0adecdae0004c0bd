"""qsgd, grid, sign and ternary against their definitions, one number at a time."""

import math

import numpy as np
import pytest

from peer.compress import build
from peer.compress.levels import level_values
from peer.compress.payload import Dense, Levels
from peer.errors import RemoteProtocolError
from peer.random import PhiloxSource
from tests.compress.vectors import AWKWARD_NAMES, GivenDraws, awkward, decompressed

DRAWS = PhiloxSource(1, 2).draws(3)


def qsgd_by_definition(v, bits, uniforms, unbiased):
    s, norm, d = 2**bits - 1, math.sqrt(math.fsum(x * x for x in v)), len(v)
    factor = 1.0 if unbiased else 1.0 / (1.0 + min(d / s**2, math.sqrt(d) / s))
    result = []
    for x, u in zip(v, uniforms, strict=True):
        if norm == 0:
            result.append(0.0)
            continue
        exact = s * abs(x) / norm
        level = min(s, math.floor(exact) + (u < exact - math.floor(exact)))
        result.append(math.copysign(norm * level / s * factor, x))
    return result


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("bits", range(1, 9))
def test_qsgd_follows_its_definition(bits, unbiased):
    rng = np.random.default_rng(bits)
    v, uniforms = rng.normal(size=200), rng.random(200)
    payload = build("qsgd", bits=bits, unbiased=unbiased).compress(v, 0, GivenDraws(uniforms))
    assert (payload.bits, payload.divisor, payload.base, payload.step) == (bits + 1, 2**bits - 1, 1 - 2**bits, 1)
    expected = qsgd_by_definition(v.tolist(), bits, uniforms.tolist(), unbiased)
    np.testing.assert_allclose(decompressed(payload, np.float64), expected, rtol=1e-14, atol=0)


def test_qsgd_rounds_up_only_where_the_uniform_is_below_the_fraction():
    v = np.array([3.0, 4.0])  # norm 5; with s = 1 the fractions are 0.6 and 0.8
    codes = build("qsgd", bits=1).compress(v, 0, GivenDraws(np.array([0.6, 0.79]))).codes
    assert codes.tolist() == [1, 2]


def test_qsgd_never_exceeds_the_highest_level():
    # The norm is rounded down here, so that |v| / ‖v‖ lies above 1.
    v = np.array([1.0000001], np.float32)
    for shift in range(200):
        v = np.nextafter(v, np.float32(2))
        for bits in (1, 8):
            codes = build("qsgd", bits=bits).compress(v, 0, GivenDraws(np.zeros(1))).codes
            assert codes[0] <= 2 ** (bits + 1) - 2, shift


@pytest.mark.parametrize("kind", ["qsgd", "ternary", "top_k"])
def test_values_whose_levels_would_overflow_are_refused(kind):
    compressor = build(kind, **{"qsgd": {"bits": 8}, "ternary": {}, "top_k": {"fraction": 1.0, "value_bits": 9}}[kind])
    most = 1.7e38 if kind == "ternary" else 6.6e35
    v = np.array([most, -most / 10, 0.0], np.float32)
    values = decompressed(compressor.compress(v, 4, GivenDraws(np.full(3, 0.999))), np.float32)
    assert values[0] == pytest.approx(most, rel=1 / 200)
    with pytest.raises(ValueError, match="layer 4"):
        compressor.compress(v * np.float32(1.1), 4, DRAWS)


def test_grid_rounds_up_where_the_uniform_is_at_most_the_fraction():
    v = np.array([0.3, 0.3, -0.3, -0.3, 1.0])
    fraction = 0.3 / 0.25 - 1.0
    uniforms = np.array([fraction, np.nextafter(fraction, 1), 0.79, 0.81, 0.5])
    payload = build("grid", step=0.25).compress(v, 0, GivenDraws(uniforms))
    assert decompressed(payload, np.float64).tolist() == [0.5, 0.25, -0.25, -0.5, 1.0]
    assert (payload.base, payload.bits, payload.scale) == (-2, 3, 0.25)


def test_grid_without_uniforms_takes_the_nearest_multiple_and_the_upper_of_two():
    v = np.array([0.125, -0.125, 0.124, -0.126, 0.375])
    payload = build("grid", step=0.25, rounding="nearest").compress(v, 0, GivenDraws())
    assert decompressed(payload, np.float64).tolist() == [0.25, 0.0, 0.0, -0.25, 0.5]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("name", AWKWARD_NAMES)
def test_grid_errors_stay_below_the_step(name, rounding, dtype):
    v = awkward(dtype)[name]
    compressor = build("grid", step=0.125, rounding=rounding)
    payload = compressor.compress(v, 0, DRAWS)
    values = decompressed(payload, dtype)
    bound = compressor.error_bound(v.size).absolute
    assert (np.abs(values - v) <= bound + np.abs(v) * np.finfo(dtype).eps).all()
    if name in ("large", "wide", "one spike"):
        assert isinstance(payload, Dense)
    elif rounding == "nearest":
        assert isinstance(payload, Levels)
        assert payload.codes.min() == 0
        assert int(payload.codes.max()).bit_length() == payload.bits or payload.bits == 1


@pytest.mark.parametrize("value", [2.0**29, -(2.0**29), 2.0**53, -(2.0**53), 1e38])
def test_multiples_far_from_zero_are_sent_one_way_or_the_other(value):
    v = np.full(3, value, np.float32)
    payload = build("grid", step=0.3).compress(v, 0, DRAWS)
    assert isinstance(payload, Levels if abs(value) < 2**30 else Dense)
    np.testing.assert_allclose(decompressed(payload, np.float32), v, rtol=1e-6)


def test_a_grid_over_a_range_clips_to_its_2_to_the_bits_levels():
    v = np.array([-9.0, -1.0, -0.3, 0.0, 0.3, 0.99, 9.0])
    payload = build("grid", bits=3, range=1.0, rounding="nearest").compress(v, 0, GivenDraws())
    assert decompressed(payload, np.float64).tolist() == [-1.0, -1.0, -0.25, 0.0, 0.25, 0.75, 0.75]
    assert (payload.bits, payload.base, payload.codes.max()) == (3, -4, 7)


def test_sign_sends_the_mean_magnitude_and_gives_zero_a_plus():
    v = np.array([1.0, -2.0, 0.0, -0.0, 5.0])
    payload = build("sign").compress(v, 0, DRAWS)
    assert decompressed(payload, np.float64).tolist() == [1.6, -1.6, 1.6, 1.6, 1.6]
    assert (payload.bits, payload.base, payload.step, payload.divisor) == (1, -1, 2, 1)


def test_ternary_sends_the_largest_magnitude_where_the_uniform_is_below_the_ratio():
    v = np.array([4.0, -1.0, -1.0, 0.0, -4.0])
    uniforms = np.array([0.999999, 0.25, 0.2499, 0.0, 0.0])
    payload = build("ternary").compress(v, 0, GivenDraws(uniforms))
    assert decompressed(payload, np.float64).tolist() == [4.0, 0.0, -4.0, 0.0, -4.0]
    assert (payload.bits, payload.scale) == (2, 4.0)


@pytest.mark.parametrize("kind", ["qsgd", "sign", "ternary"])
def test_a_layer_of_zeros_stays_zero(kind):
    compressor = build(kind, bits=3) if kind == "qsgd" else build(kind)
    for zero in (0.0, -0.0):
        assert (decompressed(compressor.compress(np.full(9, zero, np.float32), 0, DRAWS), np.float32) == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_of_levels_are_computed_in_the_stated_order(dtype):
    real = np.dtype(dtype).type
    for size in (3, 3000):
        codes = (np.arange(size) * 7 % 31).astype(np.uint8)
        levels = Levels(0.1 if dtype == np.float64 else float(np.float32(0.1)), 15, -15, 1, 5, codes)
        expected = [real(real(int(c) - 15) * real(levels.scale)) / real(15) for c in codes]
        values = level_values(levels, dtype)
        assert values.dtype == dtype
        assert values.tolist() == [float(x) for x in expected]


@pytest.mark.parametrize(
    "levels",
    [
        Levels(3e38, 1, -15, 1, 5, np.array([0], np.uint8)),
        Levels(1.0, 0, -15, 1, 5, np.array([0], np.uint8)),
        Levels(1.0, 1, 2**62, 1, 5, np.array([0], np.uint8)),
        Levels(1.0, 1, -(2**62), 1, 5, np.array([0], np.uint8)),
    ],
)
def test_levels_that_no_peer_would_send_are_refused(levels):
    with pytest.raises(RemoteProtocolError):
        level_values(levels, np.float32)


def test_a_level_that_nobody_uses_may_exceed_the_type():
    levels = Levels(3e38, 1, -1, 1, 2, np.array([0, 1, 2] * 4, np.uint8))
    assert level_values(levels, np.float32).max() == np.float32(3e38)
