"""Bytes that do not begin like a frame are no frame."""

from __future__ import annotations

import pytest

from peer.wire.errors import BadMagic
from tests.hostile.frames.forging import ZEROS, forged, refused, sealed

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("beginning", [b"sv", b"VS", b"PK", b"\x80\x04", b"\x00\x00"])
def test_other_beginnings_are_refused(beginning: bytes) -> None:
    refused(sealed(beginning + forged(ZEROS)[2:-4]), BadMagic)


def test_a_pickle_is_not_read() -> None:
    refused(b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix", BadMagic)
