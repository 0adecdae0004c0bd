"""Every native kernel of the compressors returns the bits of its numpy twin."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from peer.compress import build
from peer.compress.decompress import add_decompressed_
from peer.compress.float_types import rounded
from peer.compress.layout import Layout
from peer.compress.levels import grid_multiples, nearest_levels, stochastic_codes
from peer.compress.magnitude import copied, max_magnitude
from peer.compress.modulo import ModuloCode, recover, recover_checked, theta_floor
from peer.compress.norms import sum_of_magnitudes, sum_of_squares
from peer.compress.payload import Levels, Rounding, ValueType
from peer.compress.selection import largest_magnitudes, smallest_words
from peer.native import available, lib
from peer.random import PhiloxSource
from tests.compress.test_bias_and_bounds import ALL
from tests.compress.vectors import AWKWARD_NAMES, awkward
from tests.wire.comparing import payloads_equal

pytestmark = pytest.mark.skipif(not available(), reason="the native kernels were not built")

MODULES = [
    import_module(name)
    for name in (
        "peer.compress.decompress",
        "peer.compress.float_types",
        "peer.compress.levels",
        "peer.compress.magnitude",
        "peer.compress.modulo",
        "peer.compress.norms",
        "peer.compress.selection",
        "peer.random",
    )
]
EACH_TYPE = pytest.mark.parametrize("dtype", [np.float32, np.float64])
EACH_VECTOR = pytest.mark.parametrize("name", AWKWARD_NAMES)


def by_numpy(compute: Callable[[], Any]) -> Any:
    """Return what `compute` returns without the native kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(module, "lib", None)
        return compute()


def bits_of(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(bits_of(part) for part in result)
    if isinstance(result, np.ndarray):
        return result.dtype.str, result.shape, result.tobytes()
    return result.hex() if isinstance(result, float) else result


def assert_same_bits(compute: Callable[[], Any]) -> None:
    assert bits_of(compute()) == bits_of(by_numpy(compute))


@EACH_TYPE
@EACH_VECTOR
def test_norms(name, dtype):
    v = awkward(dtype)[name]
    for norm in (max_magnitude, sum_of_magnitudes, sum_of_squares):
        assert_same_bits(lambda norm=norm: norm(v))


@EACH_TYPE
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 4096, 70_001])
def test_norms_of_every_length(size, dtype):
    v = np.random.default_rng(size).normal(size=size).astype(dtype)
    for norm in (max_magnitude, sum_of_magnitudes, sum_of_squares):
        assert_same_bits(lambda norm=norm: norm(v))
    if size:
        assert sum_of_squares(v) == pytest.approx(float((v.astype(np.float64) ** 2).sum()), rel=1e-13)


@EACH_TYPE
@EACH_VECTOR
def test_copies_from_where_numbers_are_not_aligned(name, dtype):
    v = awkward(dtype)[name]
    apart = memoryview(b"abc" + v.tobytes())[3:]
    for compute in (lambda: copied(apart, dtype), lambda: by_numpy(lambda: copied(apart, dtype))):
        values, magnitude = compute()
        assert values.tobytes() == v.tobytes()
        np.testing.assert_equal(magnitude, max_magnitude(v))


@EACH_TYPE
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_norms_show_what_is_not_finite(bad, dtype):
    v = np.ones(5000, dtype)
    v[1234] = bad
    for norm in (max_magnitude, sum_of_magnitudes, sum_of_squares):
        assert not np.isfinite(norm(v))
        assert not np.isfinite(by_numpy(lambda norm=norm: norm(v)))


@pytest.fixture(params=["portable", "512 bit"])
def each_width(request):
    before = lib.widest_registers
    lib.widest_registers = {"portable": 0, "512 bit": 512}[request.param]
    yield
    lib.widest_registers = before


@pytest.mark.usefixtures("each_width")
class TestSelection:
    @EACH_VECTOR
    def test_of_awkward_vectors(self, name):
        v = awkward(np.float32)[name]
        for k in {1, 2, (v.size + 1) // 2, max(1, v.size // 100), v.size - 1, v.size} & set(range(1, v.size + 1)):
            assert_same_bits(lambda k=k: largest_magnitudes(v, k))

    @pytest.mark.parametrize("n", [63, 4095, 4096, 4111, 100_000, 300_007])
    @pytest.mark.parametrize("share", [0.0001, 0.01, 0.1, 0.6, 0.999])
    def test_of_every_length(self, n, share):
        rng = np.random.default_rng(n)
        v, words = rng.standard_t(2, n).astype(np.float32), rng.integers(0, 2**32, n, dtype=np.uint32)
        k = max(1, round(share * n))
        assert_same_bits(lambda: largest_magnitudes(v, k))
        assert_same_bits(lambda: smallest_words(words, k))

    @pytest.mark.parametrize("values", [[1.0], [0.0, 1.0], [1.0, 1.0, 1.0, 2.0], [0.0] * 500 + [3.0]])
    def test_of_many_equal_keys(self, values):
        v = np.random.default_rng(1).choice(np.array(values, np.float32), 50_000)
        for k in (1, 100, 12_500, 49_999):
            assert_same_bits(lambda k=k: largest_magnitudes(v, k))
            assert_same_bits(lambda k=k: smallest_words(v.view(np.uint32), k))

    def test_where_the_sample_misleads(self):
        n = 100_000
        sampled = np.arange(n // 64) * n // (n // 64)
        for seen, unseen in ((1.0, 2.0), (2.0, 1.0), (0.0, 1e30)):
            v = np.full(n, unseen, np.float32)
            v[sampled] = seen
            for k in (10, 1000, 50_000):
                assert_same_bits(lambda v=v, k=k: largest_magnitudes(v, k))


@EACH_VECTOR
@pytest.mark.parametrize("steps", [1, 7, 127, 255])
def test_stochastic_codes(name, steps):
    v = awkward(np.float32)[name]
    draws = PhiloxSource(0, 1).draws(2)
    for scale in (max_magnitude(v), float(np.float32(sum_of_squares(v) ** 0.5)), 0.0):
        for uniforms in (draws.own_stream(3), draws.own(3, v.size, np.float32), np.zeros(v.size, np.float32)):
            assert_same_bits(lambda scale=scale, uniforms=uniforms: stochastic_codes(v, scale, steps, uniforms))


@EACH_VECTOR
def test_nearest_levels(name):
    v = awkward(np.float32)[name]
    for bits in (1, 2, 4, 8, 9, 16):
        native = nearest_levels(v, bits, 0)
        assert payloads_equal(native, by_numpy(lambda bits=bits: nearest_levels(v, bits, 0))), bits


@EACH_VECTOR
@pytest.mark.parametrize("step", [0.125, 0.3, 1e-30, 1e30])
def test_grid_multiples(name, step):
    v = awkward(np.float32)[name]
    step = float(np.float32(step))
    stream = PhiloxSource(0, 1).draws(2).own_stream(3)
    for uniforms in (None, stream, stream.uniforms(v.size), np.zeros(v.size, np.float32)):
        assert_same_bits(lambda uniforms=uniforms: grid_multiples(v, step, uniforms))


@EACH_VECTOR
def test_rounding_to_bfloat16(name):
    v = awkward(np.float32)[name]
    assert_same_bits(lambda: rounded(v, ValueType.BFLOAT16).values)


def test_rounding_every_kind_of_bit_pattern_to_bfloat16():
    patterns = np.arange(0, 2**32, 65_521 // 8, dtype=np.uint64).astype(np.uint32).view(np.float32)
    finite = patterns[np.isfinite(patterns)]
    assert_same_bits(lambda: rounded(finite, ValueType.BFLOAT16).values)


@EACH_TYPE
@pytest.mark.parametrize("compressor", ALL, ids=str)
def test_whole_payloads(compressor, dtype):
    draws = PhiloxSource(0, 1).draws(2)
    for name, v in awkward(dtype).items():
        expected = by_numpy(lambda v=v: compressor.compress(v, 3, draws))
        assert payloads_equal(compressor.compress(v, 3, draws), expected), name


@pytest.mark.parametrize("weight", [1.0, 0.1, -2.5])
@pytest.mark.parametrize("compressor", [*ALL, build("top_k", fraction=0.1, value_bits=4)], ids=str)
def test_adding_payloads(compressor, weight):
    v = awkward(np.float32)["long"]
    start = np.random.default_rng(0).normal(size=v.size + 1).astype(np.float32)
    payload = compressor.compress(v, 0, PhiloxSource(0, 1).draws(2))

    def add() -> np.ndarray:
        out = start.copy()
        add_decompressed_(out[1:], (payload,), Layout.of_sizes([v.size]), weight)
        return out

    assert_same_bits(add)


@pytest.mark.parametrize(
    ("scale", "divisor", "base", "step", "bits"),
    [
        (0.1, 1, -1, 2, 1),
        (0.1, 15, -15, 1, 5),
        (1e-40, 3, -3, 1, 3),
        (0.7, 511, -511, 1, 10),
        (0.1, 1, 2**24 + 1, 3, 16),
        (0.1, 1, 2**40, 1, 4),
        (1e30, 2**25, -7, 1, 4),
    ],
)
def test_adding_levels(scale, divisor, base, step, bits):
    kind = np.uint8 if bits <= 8 else np.uint16
    codes = np.random.default_rng(0).integers(0, 2**bits, 3001).astype(kind)
    levels = Levels(float(np.float32(scale)), divisor, base, step, bits, codes)
    for weight in (1.0, 0.3):

        def add(weight: float = weight) -> np.ndarray:
            out = np.linspace(-1, 1, codes.size, dtype=np.float32)
            add_decompressed_(out, (levels,), Layout.of_sizes([codes.size]), weight)
            return out

        assert_same_bits(add)


@EACH_TYPE
@pytest.mark.parametrize("rounding", list(Rounding))
@EACH_VECTOR
def test_modulo(name, rounding, dtype):
    for bits in (2, 5, 8, 9, 16) if rounding is Rounding.STOCHASTIC else (1, 2, 5, 8, 9, 16):
        check_modulo(awkward(dtype)[name], bits, rounding, dtype)


def check_modulo(x: np.ndarray, bits: int, rounding: Rounding, dtype: npt.DTypeLike) -> None:
    theta = max(0.3, theta_floor(max_magnitude(x), bits, rounding, dtype))
    y = (x + np.random.default_rng(0).uniform(-3, 3, x.size) * theta).astype(dtype)
    code = ModuloCode(bits, rounding)
    stream = PhiloxSource(0, 1).draws(2).shared_stream(3)
    for omega in (stream, stream.uniforms(x.size, dtype)):
        payload = code.payload(x, theta, omega, verified=True)
        assert payloads_equal(payload, by_numpy(lambda omega=omega: code.payload(x, theta, omega, verified=True)))
        assert_same_bits(lambda omega=omega: code.encode(x, theta, omega))
        assert_same_bits(lambda omega=omega: code.own_value(x, theta, omega))
        for reference in (x, y):
            for read in (recover, recover_checked):
                assert_same_bits(lambda read=read, args=(payload, reference, omega): read(*args))


@given(
    v=hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    offset=st.integers(0, 3),
    number=st.integers(0, len(ALL) - 1),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=300, deadline=None)
def test_any_payload(v, offset, number, seed):
    memory = np.zeros(v.size + offset, np.float32)
    memory[offset:] = v
    draws = PhiloxSource(seed, 0).draws(0)
    compress = ALL[number].compress
    assert payloads_equal(compress(memory[offset:], 0, draws), by_numpy(lambda: compress(v, 0, draws)))
