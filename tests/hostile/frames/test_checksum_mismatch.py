"""A damaged frame is dropped, wherever the damage is."""

from __future__ import annotations

import pytest

from peer.wire.errors import ChecksumMismatch
from tests.hostile.frames.forging import ZEROS, forged, refused

pytestmark = pytest.mark.usefixtures("implementation")


def test_every_flipped_bit_behind_the_version_is_found() -> None:
    whole = forged(ZEROS)
    for position in range(3, len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            refused(bytes(damaged), ChecksumMismatch)


def test_an_exchange_of_neighbouring_bytes_is_found() -> None:
    whole = forged(b"\x08" + bytes(range(32)))
    for position in range(20, 40):
        swapped = bytearray(whole)
        swapped[position : position + 2] = swapped[position : position + 2][::-1]
        refused(bytes(swapped), ChecksumMismatch)
