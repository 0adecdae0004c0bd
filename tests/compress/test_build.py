"""Finding compressors by name, and the sentences for settings that cannot be."""

import numpy as np
import pytest

from peer.compress import COMPRESSORS, build, settings_of
from peer.compress.base import compress_layers
from peer.compress.float_types import rounded
from peer.compress.layout import Layout
from peer.compress.payload import Rounding, ValueType
from peer.random import PhiloxSource

DEFAULTS = {
    "none": {},
    "top_k": {"fraction": 0.1},
    "random_k": {"fraction": 0.1},
    "qsgd": {"bits": 4},
    "grid": {"step": 0.1},
    "sign": {},
    "ternary": {},
    "modulo": {"bits": 8, "theta": 1.0},
}


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_every_compressor_is_found_described_and_works(kind):
    compressor = build(kind, **DEFAULTS[kind])
    assert compressor.kind == kind
    assert len(COMPRESSORS[kind].summary) > 10
    assert compressor == build(kind, **DEFAULTS[kind])
    hash(compressor)
    payload = compress_layers(compressor, np.ones(5, np.float32), Layout.of_sizes([5]), PhiloxSource(0, 0).draws(0))
    assert len(payload) == 1
    assert 0 < compressor.bits_per_value(1000) <= 32


def test_required_settings_are_known():
    assert settings_of("qsgd") == {"bits": True, "unbiased": False}
    optional = dict.fromkeys(("value_bits", "value_type", "four_levels"), False)
    assert settings_of("top_k") == {"fraction": True, **optional}


def test_names_stand_for_members():
    assert build("none", value_type="float16").value_type is ValueType.FLOAT16
    assert build("modulo", bits=2, rounding="nearest").rounding is Rounding.NEAREST
    assert build("modulo", bits=2, rounding=Rounding.NEAREST).rounding is Rounding.NEAREST


@pytest.mark.parametrize(
    ("kind", "settings", "sentence"),
    [
        ("zip", {}, "no compressor 'zip'; valid: none, top_k"),
        ("sign", {"bits": 1}, "sign has no setting 'bits'; valid: none"),
        ("qsgd", {"bit": 4}, "qsgd has no setting 'bit'; valid: bits, unbiased"),
        ("qsgd", {}, "qsgd needs the setting 'bits'"),
        ("qsgd", {"bits": 0}, "bits is a whole number from 1 to 8, not 0"),
        ("qsgd", {"bits": 9}, "bits is a whole number from 1 to 8, not 9"),
        ("qsgd", {"bits": 4.0}, "bits is a whole number from 1 to 8, not 4.0"),
        ("qsgd", {"bits": True}, "bits is a whole number"),
        ("qsgd", {"bits": 4, "unbiased": 1}, "unbiased is true or false"),
        ("top_k", {"fraction": 0.0}, "fraction is a number above 0 and at most 1"),
        ("top_k", {"fraction": 0.1, "value_bits": 2, "four_levels": 4}, "four_levels is true or false"),
        ("top_k", {"fraction": 1.5}, "fraction is a number above 0 and at most 1"),
        ("top_k", {"fraction": float("nan")}, "fraction is a number"),
        ("top_k", {"fraction": "0.1"}, "fraction is a number"),
        ("top_k", {"fraction": 0.1, "value_bits": 17}, "value_bits is a whole number from 1 to 16"),
        ("top_k", {"fraction": 0.1, "value_bits": 4, "value_type": "float16"}, "exclude each other"),
        ("random_k", {"fraction": 0.1, "unbiased": True, "value_bits": 1}, "value_bits is at least 2"),
        ("random_k", {"fraction": 0.1, "unbiased": True, "value_type": "float16"}, "use value_bits"),
        ("none", {"value_type": "int8"}, "value_type is float64, float32, bfloat16 or float16, not 'int8'"),
        ("grid", {}, "needs a step, or bits and a range"),
        ("grid", {"bits": 4}, "needs a step, or bits and a range"),
        ("grid", {"step": 0.1, "bits": 4, "range": 1.0}, "either a step, or bits and a range"),
        ("grid", {"step": -1}, "step is a number above 0"),
        ("grid", {"step": float("inf")}, "step is a number above 0"),
        ("grid", {"bits": 4, "range": 0}, "range is a number above 0"),
        ("grid", {"step": 1.0, "rounding": "dither"}, "rounding is 'stochastic' or 'nearest'"),
        ("modulo", {"bits": 8, "rounding": "up"}, "rounding is nearest, stochastic or dither, not 'up'"),
        ("modulo", {"bits": 17}, "bits is a whole number from 1 to 16"),
        ("modulo", {"bits": 1, "rounding": "stochastic"}, "bits is at least 2"),
        ("modulo", {"bits": 8, "theta": 0.0}, "theta is a number above 0"),
        ("modulo", {"bits": 8, "verified": "yes"}, "verified is true or false"),
    ],
)
def test_wrong_settings_are_named_with_what_is_valid(kind, settings, sentence):
    with pytest.raises(ValueError) as caught:
        build(kind, **settings)
    assert sentence in str(caught.value)
    assert kind in str(caught.value)


def test_a_grid_step_that_the_type_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        build("grid", step=1e-60).compress(np.ones(3, np.float32), 0, PhiloxSource(0, 0).draws(0))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_to_bfloat16_is_to_nearest_even_and_saturates(dtype):
    ulp = 2.0**-7
    cases = {
        1.0: 1.0,
        1.0 + ulp / 2: 1.0,  # tie: the even one below
        1.0 + 3 * ulp / 2: 1.0 + 2 * ulp,  # tie: the even one above
        -(1.0 + ulp * 0.51): -(1.0 + ulp),
        1.0 + ulp * 0.49: 1.0,
        -0.0: -0.0,
        3.4e38: float.fromhex("0x1.fep127"),
        -3.4e38: -float.fromhex("0x1.fep127"),
        2.0**-133: 2.0**-133,
        2.0**-135: 0.0,
    }
    result = rounded(np.array(list(cases), dtype), ValueType.BFLOAT16)
    assert result.values.dtype == np.float32
    assert result.values.tolist() == list(cases.values())
    assert np.signbit(result.values[5])
    assert not (result.values.view(np.uint32) & 0xFFFF).any()


def test_a_float64_is_rounded_to_bfloat16_only_once():
    just_above, just_below = 1.0 + 2.0**-8 + 2.0**-40, 1.0 + 3 * 2.0**-8 - 2.0**-40
    result = rounded(np.array([just_above, just_below, -just_above]), ValueType.BFLOAT16).values
    assert result.tolist() == [1.0 + 2.0**-7, 1.0 + 2.0**-7, -1.0 - 2.0**-7]


def test_rounding_to_float16_and_float32_saturates():
    assert rounded(np.array([1e6, -1e6], np.float32), ValueType.FLOAT16).values.tolist() == [65504.0, -65504.0]
    largest = float(np.finfo(np.float32).max)
    assert rounded(np.array([1e300, -1e300]), ValueType.FLOAT32).values.tolist() == [largest, -largest]
