"""A stream is in a codec that exists and is allowed where it stands."""

from __future__ import annotations

import pytest

from peer.wire.errors import UnknownCodec
from tests.hostile.frames.forging import ONE, forged, levels, refused

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("codec", [3, 4, 255])
def test_a_pool_of_reals_is_in_one_of_the_other_codecs(codec: int) -> None:
    refused(forged(b"\xc8", bytes((codec,)) + bytes(32), count=b"\x01"), UnknownCodec)


def test_whole_integers_are_never_pooled() -> None:
    refused(forged(b"\x00\xc5\x07" + bytes(8), kind=3, count=b"\x01"), UnknownCodec)


@pytest.mark.parametrize("codec", [3, 4, 255])
def test_a_pool_is_in_one_of_the_other_codecs(codec: int) -> None:
    refused(forged(levels(b"", codec=3), bytes((codec,)) + bytes(8), count=b"\x01"), UnknownCodec, ONE)
