"""A frame longer than any message about the layout can be is not even looked at."""

from __future__ import annotations

import pytest

from peer.wire import max_frame_bytes
from peer.wire.errors import FrameTooLarge
from tests.hostile.frames.forging import ONE, refused

pytestmark = pytest.mark.usefixtures("implementation")


def test_a_frame_beyond_the_longest_message_is_refused_unread() -> None:
    refused(bytes(max_frame_bytes(ONE) + 1), FrameTooLarge)


def test_garbage_cannot_make_a_long_frame_welcome() -> None:
    refused(b"SV\x01" + b"\xff" * 1_000_000, FrameTooLarge)
