"""Layer numbers ascend by construction, and end with the layout."""

from __future__ import annotations

import pytest

from peer.wire import decode
from peer.wire.errors import LayerNumberOutOfRange
from tests.hostile.frames.forging import TWO, forged, refused

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("numbers", [b"\x02", b"\x7f", b"\xff" * 9 + b"\x01"])
def test_a_number_beyond_the_layout_is_refused(numbers: bytes) -> None:
    refused(forged(numbers, kind=3, count=b"\x01"), LayerNumberOutOfRange, TWO)
    refused(forged(numbers + b"\x01\x01", kind=2, count=b"\x01"), LayerNumberOutOfRange, TWO)


def test_a_second_number_beyond_the_layout_is_refused() -> None:
    refused(forged(b"\x01\x00", kind=3, count=b"\x02"), LayerNumberOutOfRange, TWO)


def test_the_smallest_step_still_ascends() -> None:
    request = decode(forged(b"\x00\x00" + bytes(4), kind=2, count=b"\x02"), TWO)
    assert [wish.layer for wish in request.wanted] == [0, 1]
