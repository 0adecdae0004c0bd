"""Block floating point: the smallest power of two that fits, rounding to nearest, and what is not of this form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from peer.compress import block_float
from peer.compress.norms import NotFiniteError
from peer.compress.payload import Dense, Levels, ValueType

values32 = st.floats(-(2.0**100), 2.0**100, width=32)


@st.composite
def spans(draw: st.DrawFn):
    sizes = np.array(draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)), np.int64)
    return draw(hnp.arrays(np.float32, int(sizes.sum()), elements=values32)), sizes


@given(spans(), st.integers(2, 16))
def test_no_number_is_off_by_more_than_half_of_its_power_of_two(drawn, bits: int) -> None:
    values, sizes = drawn
    exponents, codes = block = block_float.encode(values, sizes, bits)
    top = 2 ** (bits - 1) - 1
    integers = codes.codes.astype(int) + codes.base
    assert np.abs(integers).max() <= top
    told = block_float.decode(block, sizes)
    start = 0
    for size, code in zip(sizes.tolist(), exponents.codes.tolist(), strict=True):
        part, power = slice(start, start + size), 2.0 ** (code + exponents.base)
        start += size
        largest = float(np.abs(values[part]).max())
        assert np.abs(told[part] - values[part]).max() <= power / 2
        assert largest <= top * power
        # One power less would not do, unless there is none.
        assert largest > top * power / 2 or code == 0
        assert (told[part] == integers[part] * power).all()
    assert block_float.read(block, bits) is not None
    assert np.abs(told).max() <= block_float.bound(block)


def test_no_exponent_is_below_the_least() -> None:
    values, sizes = np.array([1.0, 3.0, 100.0], np.float32), np.array([2, 1], np.int64)
    assert block_float.exponents(values, sizes, 8).tolist() == [-5, 0]
    block = block_float.encode(values, sizes, 8, least=np.array([1, -7]))
    assert block_float.integers(block[0]).tolist() == [1, 0]
    assert block_float.decode(block, sizes).tolist() == [0.0, 4.0, 100.0]
    assert block_float.read(block, 8) is not None


def test_what_fits_is_told_exactly() -> None:
    values = np.array([127.0, -127.0, 3.0, 0.0, 2.0**-40, 0.0], np.float32)
    sizes = np.array([4, 1, 1], np.int64)
    block = block_float.encode(values, sizes, 8)
    assert block[0].codes.tolist() == [128, 128 - 46, 0]
    assert block[1].codes.tolist() == [255, 1, 131, 128, 192, 128]
    assert block_float.decode(block, sizes).tolist() == values.tolist()
    # 127.5 does not fit any more.
    assert block_float.encode(np.array([127.5]), sizes[1:2], 8)[0].codes.tolist() == [129]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e300])
def test_what_no_exponent_fits_is_refused(value: float) -> None:
    with pytest.raises(NotFiniteError, match="layer 3"):
        block_float.encode(np.array([1.0, value, 2.0]), np.array([1, 1, 1], np.int64), 8, layer=3)


def test_layers_of_another_form_are_not_read() -> None:
    sizes = np.array([2, 1], np.int64)
    exponents, codes = block_float.encode(np.array([1.0, 2.0, 3.0]), sizes, 8)
    other = [
        (),
        (exponents,),
        (exponents, codes, codes),
        (exponents, Dense(np.zeros(3, np.float32), ValueType.FLOAT32)),
        (Dense(np.zeros(2, np.float32), ValueType.FLOAT32), codes),
        block_float.encode(np.array([1.0, 2.0, 3.0]), sizes, 7),
        (exponents, Levels(2.0, 1, -128, 1, 8, codes.codes)),
        (exponents, Levels(1.0, 2, -128, 1, 8, codes.codes)),
        (exponents, Levels(1.0, 1, -127, 1, 8, codes.codes)),
        (exponents, Levels(1.0, 1, -128, 2, 8, codes.codes)),
        (exponents, Levels(1.0, 1, -128, 1, 8, np.array([0, 5, 6], np.uint8))),
    ]
    assert block_float.read((exponents, codes), 8) is not None
    for layers in other:
        assert block_float.read(layers, 8) is None


@given(st.lists(spans(), min_size=1, max_size=4), st.integers(2, 16))
def test_groups_of_spans_can_be_encoded_at_once(groups, bits: int) -> None:
    values, sizes = (np.concatenate(parts) for parts in zip(*groups, strict=True))
    together = block_float.split(block_float.encode(values, sizes, bits), [group_sizes for _, group_sizes in groups])
    for (group, group_sizes), found in zip(groups, together, strict=True):
        for alone, cut in zip(block_float.encode(group, group_sizes, bits), found, strict=True):
            assert cut.codes.tobytes() == alone.codes.tobytes()
            assert (cut.scale, cut.divisor, cut.base, cut.step, cut.bits) == (1.0, 1, alone.base, 1, alone.bits)
