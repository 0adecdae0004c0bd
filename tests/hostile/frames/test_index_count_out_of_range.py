"""A sparse layer has no more entries than coordinates."""

from __future__ import annotations

import pytest

from peer.wire.errors import IndexCountOutOfRange
from peer.wire.reader import varint
from tests.hostile.frames.forging import forged, refused, sparse

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("code", [0, 28, 29, 30, 31])
@pytest.mark.parametrize("count", [9, 2**20, 2**63, 2**64 - 1])
def test_more_entries_than_coordinates_are_refused_before_anything_is_allocated(code: int, count: int) -> None:
    refused(forged(sparse(code, varint(count), bytes(40))), IndexCountOutOfRange)


@pytest.mark.parametrize("count", [0, 7])
def test_all_means_all(count: int) -> None:
    refused(forged(sparse(31, varint(count), b"\x08" + bytes(4 * count))), IndexCountOutOfRange)
