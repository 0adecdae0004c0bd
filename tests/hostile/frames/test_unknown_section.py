"""A section is of a known kind, and of one that its message can hold."""

from __future__ import annotations

import pytest

from peer.wire.errors import UnknownSection
from tests.hostile.frames.forging import ONE, ZEROS, forged, levels, refused, residues, sparse

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("tag", [6, 7, 0x0E, 0xFF, 0x20, 0x11, 0x21, 0x14, 0x24, 0x0D, 0x15])
def test_unknown_tags_are_refused(tag: int) -> None:
    refused(forged(bytes((tag,)) + bytes(40)), UnknownSection)


@pytest.mark.parametrize("tag", [2, 3, 4, 5, 6, 7, 0x28])
def test_sparse_values_are_dense_or_levels(tag: int) -> None:
    refused(forged(sparse(31, b"\x08", bytes((tag,)) + bytes(40))), UnknownSection)


def test_repairs_hold_nothing_but_repairs() -> None:
    for section in (ZEROS, levels(bytes(4)), residues(bytes(8))):
        refused(forged(b"\x00" + section, kind=3, count=b"\x01"), UnknownSection)


@pytest.mark.parametrize("section", [b"\x04\x08\x07" + bytes(8), b"\x05\x00\x00"])
def test_gossip_holds_no_repairs(section: bytes) -> None:
    refused(forged(section), UnknownSection, ONE)
