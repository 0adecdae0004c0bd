"""A weight is a finite number, and a push weight is no debt."""

from __future__ import annotations

import math
import struct

import pytest

from peer.wire.errors import WeightOutOfRange
from tests.hostile.frames.forging import ZEROS, forged, refused

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(weight: float) -> None:
    spelled = b"\x01" + struct.pack("<d", weight)
    refused(forged(ZEROS, weights=spelled + b"\x02"), WeightOutOfRange)
    refused(forged(ZEROS, weights=b"\x02" + spelled), WeightOutOfRange)


@pytest.mark.parametrize("weight", [-5e-324, -1.0, -1e300])
def test_negative_push_weights_are_refused(weight: float) -> None:
    refused(forged(ZEROS, weights=b"\x02\x01" + struct.pack("<d", weight)), WeightOutOfRange)
