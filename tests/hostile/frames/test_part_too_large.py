"""The sections of a part have sizes of their own, which are bounded by the layout."""

from __future__ import annotations

import pytest

from peer.compress.payload import num_values
from peer.wire import decode
from peer.wire.errors import LayerCountMismatch, PartTooLarge, UnknownSection
from tests.hostile.frames.forging import ONE, TWO, forged, levels, refused, residues, sparse

pytestmark = pytest.mark.usefixtures("implementation")
HUGE = b"\xff" * 9 + b"\x01"


@pytest.mark.parametrize("sizes", [b"\x11", b"\x10\x01", b"\x01" + HUGE, HUGE, b"\x00", b"\x08\x00"])
def test_a_part_of_more_than_twice_the_layout_or_of_nothing_is_refused(sizes: bytes) -> None:
    count = 1 if sizes == HUGE else len(sizes) - (len(HUGE) - 1) * (HUGE in sizes)
    refused(forged(sizes + levels(bytes(40)), kind=7, count=bytes((count,))), PartTooLarge)


def test_the_largest_part_is_read() -> None:
    message = decode(forged(b"\x10" + levels(bytes(8)), kind=7, count=b"\x01"), ONE)
    assert [layer.codes.size for layer in message.layers] == [16]


@pytest.mark.parametrize("count", [b"\x04", b"\xff\xff\xff\xff\x0f", HUGE])
def test_a_part_of_more_sections_than_one_beyond_the_layout_is_refused(count: bytes) -> None:
    refused(forged(b"\x01" * 40, kind=7, count=count), LayerCountMismatch, TWO)


REALS = b"\x08" + bytes(32)


@pytest.mark.parametrize("section", [residues(bytes(8)), b"\x04\x08\x07" + bytes(8), b"\x05\x00\x00"])
def test_a_part_holds_neither_residues_nor_repairs(section: bytes) -> None:
    refused(forged(b"\x08" + section, kind=7, count=b"\x01"), UnknownSection)


@pytest.mark.parametrize("section", [REALS, sparse(31, b"\x08", REALS)])
def test_a_part_of_more_numbers_than_the_layout_holds_nothing_but_levels(section: bytes) -> None:
    frames = [forged(size + section, kind=7, count=b"\x01") for size in (b"\x08", b"\x09")]
    assert [num_values(layer) for layer in decode(frames[0], ONE).layers] == [8]
    refused(frames[1], UnknownSection)
