"""An index lies in its layer; unsorted and repeated ones cannot be written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peer.compress.payload import Sparse
from peer.errors import FrameError
from peer.wire import decode
from peer.wire.errors import IndexOutOfRange
from tests.hostile.frames.forging import ONE, TWO, forged, refused, sparse

pytestmark = pytest.mark.usefixtures("implementation")

VALUE = b"\x08" + bytes(4)


def test_a_gap_that_leaves_the_layer_is_refused() -> None:
    # Parameter 3: a zero, a one, and three low bits of zero: a gap of eight.
    refused(forged(sparse(3, b"\x01", b"\x02" + VALUE)), IndexOutOfRange)


def test_gaps_whose_sum_leaves_the_layer_are_refused() -> None:
    # Parameter 2: two ones, and the low bits of two gaps of three and three: indices 3 and 7.
    decode(forged(sparse(2, b"\x02", b"\x3f" + VALUE + bytes(4))), ONE)
    # A zero before the second one makes its gap seven.
    refused(forged(sparse(2, b"\x02", b"\x7d" + VALUE + bytes(4))), IndexOutOfRange)


def test_pooled_gaps_that_leave_the_layer_are_refused() -> None:
    values = b"\x08" + bytes(8)
    refused(forged(sparse(29, b"\x02", values), b"\x3f", count=b"\x01"), IndexOutOfRange)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 31), st.integers(0, 40), st.binary(max_size=60))
def test_whatever_decodes_is_sorted_and_inside(code: int, count: int, tail: bytes) -> None:
    try:
        layer = decode(forged(b"\x08" + bytes(32), sparse(code, bytes((count,)), tail)), TWO).layers[1]
    except FrameError:
        return
    assert isinstance(layer, Sparse)
    assert layer.indices.size == count
    assert np.all(np.diff(layer.indices) > 0)
    assert count == 0 or (layer.indices[0] >= 0 and layer.indices[-1] < TWO.sizes[1])
