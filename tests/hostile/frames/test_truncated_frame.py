"""Every field that would reach beyond the frame is found out before it is read."""

from __future__ import annotations

import pytest

from peer.wire import decode
from peer.wire.errors import TruncatedFrame
from tests.hostile.frames.forging import ONE, ZEROS, forged, levels, refused, sealed, sparse

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("length", range(8))
def test_less_than_a_header_is_refused(length: int) -> None:
    refused(b"SV\x01\x00\x01\x02\x00"[:length], TruncatedFrame)


def test_every_resealed_beginning_of_a_frame_is_refused() -> None:
    whole = forged(ZEROS)
    decode(whole, ONE)
    for length in range(4, len(whole) - 4):
        refused(sealed(whole[:length]), TruncatedFrame)


def test_codes_that_end_early_are_refused() -> None:
    refused(forged(levels(bytes(3))), TruncatedFrame)


def test_a_varint_that_never_ends_is_refused() -> None:
    refused(sealed(b"SV\x01\x00\x81\x81\x81"), TruncatedFrame)


def test_a_rice_code_without_its_last_one_is_refused() -> None:
    refused(forged(sparse(0, b"\x03", b"\x03\x08" + bytes(2))), TruncatedFrame)


def test_a_rice_code_whose_low_bits_exceed_the_frame_is_refused_before_they_are_allocated() -> None:
    refused(forged(sparse(28, b"\x07", b"\x7f")), TruncatedFrame)


def test_a_compressed_section_longer_than_the_frame_is_refused() -> None:
    refused(forged(levels(b"\xff\xff\xff\x7f" + bytes(9), codec=2)), TruncatedFrame)


def test_lanes_that_exceed_the_frame_are_refused() -> None:
    stream = bytes((7, 8, 0, 1, 0b11))
    refused(forged(levels(stream + bytes(20), codec=1)), TruncatedFrame)
