"""A message has as many layers as the layout and its kind say."""

from __future__ import annotations

import pytest

from peer.wire.errors import LayerCountMismatch
from tests.hostile.frames.forging import TWO, ZEROS, forged, refused

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("count", [b"\x00", b"\x01", b"\x03", b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01"])
@pytest.mark.parametrize("kind", [0, 4, 5])
def test_another_number_of_layers_than_the_layouts_is_refused(kind: int, count: bytes) -> None:
    refused(forged(ZEROS, kind=kind, count=count), LayerCountMismatch, TWO)


@pytest.mark.parametrize("kind", [1, 6])
def test_messages_without_layers_have_none(kind: int) -> None:
    refused(forged(ZEROS, kind=kind), LayerCountMismatch)


@pytest.mark.parametrize("kind", [2, 3])
@pytest.mark.parametrize("count", [b"\x03", b"\xff\xff\xff\xff\xff\xff\xff\x7f"])
def test_repairs_of_more_layers_than_there_are_are_refused(kind: int, count: bytes) -> None:
    refused(forged(bytes(16), kind=kind, count=count), LayerCountMismatch, TWO)
