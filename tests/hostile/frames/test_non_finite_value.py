"""Infinities and what is not a number never reach the model."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from peer.wire.errors import NonFiniteValue
from peer.wire.reader import varint
from tests.hostile.frames.forging import forged, levels, refused, residues, sparse

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 3, 7])
def test_float_values_are_finite(value: float, position: int) -> None:
    values = np.zeros(8)
    values[position] = value
    refused(forged(b"\x00" + values.astype("<f8").tobytes()), NonFiniteValue)
    refused(forged(b"\x08" + values.astype("<f4").tobytes()), NonFiniteValue)
    refused(forged(b"\x10" + (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()), NonFiniteValue)
    refused(forged(b"\x18" + values.astype("<f2").tobytes()), NonFiniteValue)


def test_a_nan_with_a_message_in_its_mantissa_is_refused() -> None:
    refused(forged(b"\x08" + bytes(28) + b"\x01\x00\x80\xff"), NonFiniteValue)


def test_kept_values_are_finite() -> None:
    refused(forged(sparse(31, b"\x08", b"\x08" + bytes(28) + struct.pack("<f", math.inf))), NonFiniteValue)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scales_and_thetas_are_finite(value: float) -> None:
    refused(forged(levels(bytes(4), scale=value)), NonFiniteValue)
    refused(forged(residues(bytes(8), theta=value)), NonFiniteValue)


def test_a_finite_scale_cannot_make_an_infinite_level() -> None:
    steps = b"\x01\x00" + varint(2**40)
    refused(forged(levels(bytes(4), scale=3e38, tail=b"\x07\x0d\x01")), NonFiniteValue)
    refused(forged(levels(bytes(4), scale=1e30, tail=steps)), NonFiniteValue)
