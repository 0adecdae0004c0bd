"""Unused bits carry no message."""

from __future__ import annotations

import pytest

from peer.compress.layout import Layout
from peer.wire import decode
from peer.wire.errors import PaddingNotZero
from tests.hostile.frames.forging import ONE, TWO, forged, levels, refused, sparse

pytestmark = pytest.mark.usefixtures("implementation")


FIVE = Layout.of_sizes([5])


@pytest.mark.parametrize("last", [0x10, 0x80, 0xF0])
def test_packed_codes_end_in_zeros(last: int) -> None:
    refused(forged(levels(bytes((0, 0, last)))), PaddingNotZero, FIVE)


def test_rice_codes_end_in_zeros() -> None:
    value = b"\x08" + bytes(4)
    decode(forged(sparse(0, b"\x01", b"\x01" + value)), ONE)
    refused(forged(sparse(0, b"\x01", b"\x03" + value)), PaddingNotZero)


def test_pooled_gaps_end_in_zeros() -> None:
    value = b"\x08" + bytes(4)
    decode(forged(sparse(29, b"\x01", value), b"\x07", count=b"\x01"), ONE)
    refused(forged(sparse(29, b"\x01", value), b"\x0f", count=b"\x01"), PaddingNotZero)


def test_raw_bits_end_in_zeros() -> None:
    one_raw_bit = bytes((0, 0x28, 1, 0, 0))
    decode(forged(levels(one_raw_bit + b"\x1f", codec=1)), FIVE)
    refused(forged(levels(one_raw_bit + b"\x3f", codec=1)), PaddingNotZero, FIVE)


def test_the_tables_of_spans_end_in_zeros() -> None:
    # Two tables of one token each, and a bit for each of two layers.
    pooled = levels(b"", codec=3), b"\xc9" + bytes(4)
    decode(forged(*pooled, bytes((1, 8, 8, 0, 1, 0b10, 0, 0)), count=b"\x02"), TWO)
    refused(forged(*pooled, bytes((1, 8, 8, 0, 1, 0b110, 0, 0)), count=b"\x02"), PaddingNotZero, TWO)
