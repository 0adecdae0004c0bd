"""A kind of message that does not exist, or a flag without a meaning, is refused."""

from __future__ import annotations

import pytest

from peer.wire.errors import UnknownKind
from tests.hostile.frames.forging import ZEROS, forged, refused

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("kind", [8, 15, 0x40, 0x80, 0xC0, 0xFF])
def test_unknown_kinds_and_flags_are_refused(kind: int) -> None:
    refused(forged(ZEROS, kind=kind), UnknownKind)
