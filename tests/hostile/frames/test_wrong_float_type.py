"""A run in float32 takes no float64 numbers."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from peer.wire import decode
from peer.wire.errors import WrongFloatType
from tests.hostile.frames.forging import ONE, forged, refused, sparse

pytestmark = pytest.mark.usefixtures("implementation")


def test_float64_values_are_refused_by_a_run_in_float32() -> None:
    frame = forged(b"\x00" + bytes(64))
    refused(frame, WrongFloatType, dtype=np.float32)
    decode(frame, ONE, dtype=np.float64)


def test_kept_float64_values_are_too() -> None:
    refused(forged(sparse(31, b"\x08", b"\x00" + bytes(64))), WrongFloatType, dtype=np.float32)


def test_float64_scales_are_too() -> None:
    section = b"\x01\x03\x07\x0d\x01" + struct.pack("<d", 0.1) + bytes(4)
    frame = forged(section, kind=0x10)
    refused(frame, WrongFloatType, dtype=np.float32)
    decode(frame, ONE, dtype=np.float64)
