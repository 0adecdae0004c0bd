"""A number has one spelling, and ends."""

from __future__ import annotations

import pytest

from peer.wire.errors import MalformedNumber
from tests.hostile.frames.forging import ZEROS, forged, refused

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize(
    "sender", [b"\x80\x00", b"\x81\x80\x00", b"\xff" * 9 + b"\x02", b"\xff" * 10, b"\x80" * 9 + b"\x00"]
)
def test_long_spellings_and_endless_numbers_are_refused(sender: bytes) -> None:
    refused(forged(ZEROS, names=sender + b"\x02\x00"), MalformedNumber)


def test_a_layer_count_in_a_long_spelling_is_refused() -> None:
    refused(forged(ZEROS, count=b"\x81\x00"), MalformedNumber)
