"""Moniqua's code: its definition, its bound, one value for sender and receivers, the hash, exact repair."""

import math

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.compress import build
from peer.compress.modulo import (
    CodeRangeError,
    ModuloCode,
    apply_repair,
    delta,
    hash_integers,
    largest_integer,
    modulus,
    more_bits,
    recover,
    recover_checked,
    theta_floor,
    values_of,
)
from peer.compress.payload import Residues, Rounding, WholeIntegers
from peer.errors import RemoteProtocolError
from peer.random import PhiloxSource

SETTINGS = [
    (bits, rounding)
    for rounding in Rounding
    for bits in (1, 2, 3, 4, 8, 9, 16)
    if not (rounding is Rounding.STOCHASTIC and bits == 1)
]
EACH_SETTING = pytest.mark.parametrize(("bits", "rounding"), SETTINGS)


def omega_for(rounding, size, dtype, seed=0):
    if rounding is Rounding.NEAREST:
        return None
    return np.random.default_rng(seed).random(size, dtype=np.float32).astype(dtype)


def models(size, theta, dtype, seed=0, spread=10.0):
    """Two models less than θ apart."""
    rng = np.random.default_rng(seed)
    x = (spread * rng.normal(size=size)).astype(dtype)
    y = (x + theta * rng.uniform(-0.999, 0.999, size)).astype(dtype)
    return x, y


def test_the_constants_are_the_papers():
    assert delta(1, Rounding.NEAREST) == 0.25
    assert delta(8, Rounding.STOCHASTIC) == 1 / 256
    assert delta(8, Rounding.DITHER) == 1 / 512
    assert modulus(2.0, 2, Rounding.STOCHASTIC) == 8.0
    assert modulus(3.0, 1, Rounding.DITHER) == 12.0
    assert tuple(largest_integer(np.dtype(kind)) for kind in (np.float32, np.float64)) == (2**23, 2**52)


@EACH_SETTING
def test_integers_follow_the_table(bits, rounding):
    x, _ = models(300, 0.5, np.float64)
    omega = omega_for(rounding, 300, np.float64)
    b, levels = modulus(0.5, bits, rounding), 2**bits
    code = ModuloCode(bits, rounding)
    expected = [math.floor(levels * v / b + (0.0 if omega is None else omega[i])) for i, v in enumerate(x.tolist())]
    integers = code.encode(x, 0.5, omega)
    assert integers.dtype == np.int64
    assert integers.tolist() == expected
    assert more_bits(integers, 0, bits).codes.tolist() == [k % levels for k in expected]


@EACH_SETTING
def test_recovery_equals_the_printed_formula_to_rounding(bits, rounding):
    x, y = models(2000, 0.5, np.float64)
    omega = omega_for(rounding, 2000, np.float64)
    payload = ModuloCode(bits, rounding).payload(x, 0.5, omega)
    b = modulus(0.5, bits, rounding)
    offset = {Rounding.NEAREST: 0.5, Rounding.STOCHASTIC: 0.0}.get(rounding)
    q = (payload.residues + (0.5 - omega if offset is None else offset)) / 2**bits
    for reference in (y, x):
        wrapped = (q * b - reference + b / 2) % b - b / 2
        np.testing.assert_allclose(recover(payload, reference, omega), wrapped + reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@EACH_SETTING
def test_errors_stay_within_delta_b_and_come_close_to_it(bits, rounding, dtype):
    theta = 0.5
    x, y = models(40_000, theta, dtype, spread=3.0)
    omega = omega_for(rounding, x.size, dtype)
    payload = ModuloCode(bits, rounding).payload(x, theta, omega)
    error = np.abs(recover(payload, y, omega).astype(np.float64) - x)
    bound = delta(bits, rounding) * modulus(theta, bits, rounding)
    rounding_error = 20.0 * float(np.finfo(dtype).eps)
    assert error.max() <= bound + rounding_error
    assert error.max() >= 0.99 * bound - rounding_error


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_dither_is_unbiased_and_nearest_is_not(bits):
    x, theta, rounds = np.linspace(-1.0, 1.0, 41), 0.7, 4000
    code = ModuloCode(bits, Rounding.DITHER)
    values = np.stack([code.own_value(x, theta, PhiloxSource(1, 0).draws(t).shared_stream(0)) for t in range(rounds)])
    bound = delta(bits, Rounding.DITHER) * modulus(theta, bits, Rounding.DITHER)
    # The error is uniform in ±δB, whatever x is: standard deviation δB/√3.
    assert np.abs(values.mean(axis=0) - x).max() < 6 * bound / math.sqrt(3 * rounds)
    np.testing.assert_allclose(values.std(axis=0), bound / math.sqrt(3), rtol=0.1)
    assert np.abs(ModuloCode(bits, Rounding.NEAREST).own_value(x, theta) - x).max() > 0.9 * bound


def test_stochastic_rounding_is_unbiased():
    x, theta, rounds = np.linspace(-1.0, 1.0, 41), 0.7, 4000
    code = ModuloCode(2, Rounding.STOCHASTIC)
    values = np.stack([code.own_value(x, theta, PhiloxSource(1, 0).draws(t).shared_stream(0)) for t in range(rounds)])
    step = modulus(theta, 2, Rounding.STOCHASTIC) / 4
    assert np.abs(values.mean(axis=0) - x).max() < 6 * step / 2 / math.sqrt(rounds)


def test_one_bit_of_stochastic_rounding_is_refused():
    for make in (lambda: ModuloCode(1, Rounding.STOCHASTIC), lambda: build("modulo", bits=1, rounding="stochastic")):
        with pytest.raises(ValueError, match="at least 2"):
            make()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@EACH_SETTING
def test_sender_and_receivers_hold_the_same_bits(bits, rounding, dtype):
    # Away from the very edge of θ, where float32 cannot tell which side x lies on.
    rng = np.random.default_rng(3)
    x = (5.0 * rng.normal(size=10_000)).astype(dtype)
    theta = 0.37
    y = (x + theta * rng.uniform(-0.99, 0.99, x.size)).astype(dtype)
    omega = omega_for(rounding, x.size, dtype)
    code = ModuloCode(bits, rounding)
    integers = code.encode(x, theta, omega)
    payload = code.payload(x, theta, omega, verified=True)
    assert payload.check == hash_integers(integers)
    assert payload.theta == float(np.dtype(dtype).type(theta))
    assert (payload.residues == more_bits(integers, 0, bits).codes).all()
    own = code.own_value(x, theta, omega)
    assert own.dtype == dtype
    assert recover(payload, y, omega).tobytes() == own.tobytes()
    assert recover(payload, x, omega).tobytes() == own.tobytes()
    assert values_of(payload, integers, omega, dtype).tobytes() == own.tobytes()
    checked, right = recover_checked(payload, y, omega)
    assert right
    assert checked.tobytes() == own.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rounding", list(Rounding))
def test_a_stream_gives_what_its_uniforms_give(rounding, dtype):
    x, y = models(70_001, 0.5, dtype)
    stream = PhiloxSource(4, 0).draws(2).shared_stream(5)
    omega = stream.uniforms(x.size, dtype)
    code = ModuloCode(4, rounding)
    by_stream, by_array = (code.payload(x, 0.5, w, verified=True) for w in (stream, omega))
    assert by_stream.check == by_array.check
    assert (by_stream.residues == by_array.residues).all()
    assert (recover(by_stream, y, stream) == recover(by_array, y, omega)).all()
    assert (recover_checked(by_stream, y, stream)[0] == recover(by_array, y, omega)).all()


def test_the_hash_is_xxh3_over_little_endian_int64():
    integers = np.array([0, 1, -1, 2**40], np.int64)
    assert hash_integers(integers) == xxhash.xxh3_64_intdigest(integers.astype("<i8").tobytes(), seed=0)
    assert hash_integers(integers) == 14983009609474941478
    assert hash_integers(integers[::2]) == hash_integers(integers[::2].copy())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@EACH_SETTING
def test_a_bound_that_is_broken_by_design_is_noticed_and_repaired_exactly(bits, rounding, dtype):
    """Half of the coordinates lie beyond θ, up to 40 θ."""
    rng = np.random.default_rng(bits)
    x = rng.normal(size=5000).astype(dtype)
    theta = 0.05
    far = rng.random(x.size) < 0.5
    y = (x + np.where(far, rng.uniform(1.5, 40.0, x.size), rng.uniform(-0.9, 0.9, x.size)) * theta).astype(dtype)
    omega = omega_for(rounding, x.size, dtype)
    code = ModuloCode(bits, rounding)
    integers = code.encode(x, theta, omega)
    payload = code.payload(x, theta, omega, verified=True)
    assert not recover_checked(payload, y, omega)[1]
    assert 0.3 < (recover(payload, y, omega) != code.own_value(x, theta, omega)).mean() < 0.6

    repairs, known = [], bits
    while True:
        repairs.append(more_bits(integers, known, 2))
        known += 2
        repaired = apply_repair(payload, repairs, y, omega)
        if hash_integers(repaired) == payload.check:
            break
    assert len(repairs) <= 3  # 2^6 θ is more than 40 θ
    assert (repaired == integers).all()
    assert values_of(payload, repaired, omega, dtype).tobytes() == code.own_value(x, theta, omega).tobytes()
    whole = apply_repair(payload, [*repairs, WholeIntegers(integers)], y, omega)
    assert (whole == integers).all()


@given(
    bits=st.integers(1, 16),
    rounding=st.sampled_from(Rounding),
    extra=st.lists(st.integers(1, 16), max_size=2),
    seed=st.integers(0, 2**32),
    log_theta=st.floats(-6.0, 3.0),
    wide=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_repairs_extend_the_reach_by_the_bits_they_carry(bits, rounding, extra, seed, log_theta, wide):
    if rounding is Rounding.STOCHASTIC and bits == 1:
        bits = 2
    dtype = np.float64 if wide else np.float32
    rng = np.random.default_rng(seed)
    x = rng.normal(size=50).astype(dtype)
    theta = max(10.0**log_theta, 4 * theta_floor(float(np.abs(x).max()), bits, rounding, dtype))
    omega = omega_for(rounding, 50, dtype, seed)
    code = ModuloCode(bits, rounding)
    integers, payload = code.encode(x, theta, omega), code.payload(x, theta, omega)
    reach = 0.9 * theta * 2.0 ** min(sum(extra), 10)
    y = (x + reach * rng.uniform(-1, 1, 50)).astype(dtype)
    repairs, known = [], bits
    for more in extra:
        repairs.append(more_bits(integers, known, more))
        known += more
    assert (apply_repair(payload, repairs, y, omega) == integers).all()


def test_weights_too_large_for_theta_are_refused_with_the_theta_to_use():
    x = np.full(10, 3.0, np.float32)
    code = ModuloCode(8, Rounding.NEAREST)
    floor = theta_floor(3.0, 8, Rounding.NEAREST, np.float32)
    code.encode(x, floor)
    assert code.encode(x, floor).max() in (2**22 - 1, 2**22)
    with pytest.raises(CodeRangeError, match=r"θ is too small .* use at least"):
        code.encode(x, floor * 0.499)
    assert code.encode(x.astype(np.float64), floor * 0.499).max() > 2**22
    for dtype in (np.float32, np.float64):
        tiny = theta_floor(0.0, 8, Rounding.NEAREST, dtype)
        assert tiny > 0
        assert (code.encode(np.zeros(3, dtype), tiny) == 0).all()


@pytest.mark.parametrize("theta", [0.0, -1.0, math.nan, math.inf, 1e-50, 3e38])
def test_a_theta_that_is_no_usable_number_is_refused_on_both_sides(theta):
    code = ModuloCode(4, Rounding.NEAREST)
    x = np.ones(3, np.float32)
    with pytest.raises(ValueError, match="θ"):
        code.payload(x, theta)
    with pytest.raises(RemoteProtocolError, match="θ"):
        recover(Residues(theta, 4, Rounding.NEAREST, np.zeros(3, np.uint8), None), x)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"theta": 1e-30}, "too small for the receiver"),
        ({"residues": np.zeros(2, np.uint8)}, "2 residues for a layer of 3"),
        ({"bits": 0}, "cannot be"),
        ({"bits": 17}, "cannot be"),
        ({"bits": 1, "rounding": Rounding.STOCHASTIC}, "cannot be"),
    ],
)
def test_codes_that_no_peer_would_send_are_refused(change, sentence):
    given_ = {"theta": 1.0, "bits": 4, "rounding": Rounding.NEAREST, "residues": np.zeros(3, np.uint8), "check": None}
    payload = Residues(**(given_ | change))
    y = np.ones(3, np.float32)
    with pytest.raises(RemoteProtocolError, match=sentence):
        recover(payload, y, np.zeros(3, np.float32))
    with pytest.raises(RemoteProtocolError):
        apply_repair(payload, [], y, np.zeros(3, np.float32))


def test_repairs_that_do_not_fit_are_refused():
    code = ModuloCode(4, Rounding.NEAREST)
    x = np.ones(3, np.float32)
    integers, payload = code.encode(x, 1.0), code.payload(x, 1.0)
    for repairs in (
        [more_bits(integers, 5, 2)],
        [more_bits(integers, 4, 2), more_bits(integers, 4, 2)],
        [more_bits(integers[:2], 4, 2)],
        [WholeIntegers(integers[:2])],
        [WholeIntegers(integers + 2**30)],
        [WholeIntegers(integers), more_bits(integers, 4, 2)],
        [more_bits(integers, 4 + 16 * i, 16) for i in range(4)],
    ):
        with pytest.raises(RemoteProtocolError):
            apply_repair(payload, repairs, x)


def test_a_code_without_a_hash_does_not_pass_for_verified():
    payload = ModuloCode(4, Rounding.NEAREST).payload(np.ones(3, np.float32), 1.0)
    with pytest.raises(RemoteProtocolError, match="hash"):
        recover_checked(payload, np.ones(3, np.float32))


def test_the_compressor_takes_theta_from_its_caller_or_its_settings():
    x, draws = np.linspace(-1, 1, 9), PhiloxSource(0, 0).draws(0)
    compressor = build("modulo", bits=8, rounding="stochastic", theta=0.5, verified=True)
    assert compressor.needs_reference
    constant, larger = compressor.compress(x, 0, draws), compressor.compress(x, 0, draws, 1.0)
    assert (constant.theta, larger.theta) == (0.5, 1.0)
    assert constant.check is not None
    assert (
        recover(larger, x, compressor.omega(x, 0, draws))
        == compressor.code.own_value(x, 1.0, compressor.omega(x, 0, draws))
    ).all()
    with pytest.raises(ValueError, match="needs θ"):
        build("modulo", bits=8).compress(x, 0, draws)


def test_omega_is_the_same_for_every_peer():
    x = np.ones(10, np.float32)
    compressor = build("modulo", bits=1, theta=1.0)
    a, b = (compressor.omega(x, 3, PhiloxSource(1, peer).draws(2)) for peer in (0, 1))
    assert a == b
    assert build("modulo", bits=1, theta=1.0, rounding="nearest").omega(x, 3, PhiloxSource(1, 0).draws(2)) is None


def test_memory_of_another_shape_is_refused():
    x = np.ones(10, np.float32)
    code = ModuloCode(4, Rounding.NEAREST)
    for out in (np.zeros(9, np.float32), np.zeros(10)):
        with pytest.raises(ValueError, match="out has to be"):
            code.own_value(x, 1.0, out=out)
        with pytest.raises(ValueError, match="out has to be"):
            recover(code.payload(x, 1.0), x, out=out)
    memory = np.zeros(12, np.float32)
    assert (recover(code.payload(x, 1.0), x, out=memory[1:11]) == code.own_value(x, 1.0)).all()
    assert memory[0] == memory[11] == 0


def test_missing_or_misshapen_omega_is_refused():
    x = np.ones(10, np.float32)
    code = ModuloCode(4, Rounding.DITHER)
    for omega in (None, np.zeros(9, np.float32), np.zeros(10)):
        with pytest.raises(ValueError, match=r"needs its uniforms|uniforms of float32 are needed"):
            code.encode(x, 1.0, omega)
        with pytest.raises(ValueError, match=r"needs its uniforms|uniforms of float32 are needed"):
            recover(Residues(1.0, 4, Rounding.DITHER, np.zeros(10, np.uint8), None), x, omega)
