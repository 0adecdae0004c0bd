"""A repair request asks for bits that exist."""

from __future__ import annotations

import pytest

from peer.wire.errors import WishOutOfRange
from tests.hostile.frames.forging import forged, refused

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("wish", [b"\x41\x01", b"\xff\x00", b"\x08\x11", b"\x08\xff"])
def test_impossible_bits_are_refused(wish: bytes) -> None:
    refused(forged(b"\x00" + wish, kind=2, count=b"\x01"), WishOutOfRange)
