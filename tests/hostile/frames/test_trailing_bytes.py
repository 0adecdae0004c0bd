"""Nothing may hide behind the last section."""

from __future__ import annotations

import pytest

from peer.wire.errors import TrailingBytes
from tests.hostile.frames.forging import ZEROS, forged, refused

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("extra", [b"\x00", ZEROS, bytes(64)])
def test_what_follows_the_last_section_is_refused(extra: bytes) -> None:
    refused(forged(ZEROS, extra, count=b"\x01"), TrailingBytes)


def test_a_message_without_layers_holds_nothing_else() -> None:
    refused(forged(b"\x00", kind=1, count=b"\x00"), TrailingBytes)
