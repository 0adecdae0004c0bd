"""A version that this program does not speak is named, not guessed at."""

from __future__ import annotations

import pytest

from peer.wire.errors import UnsupportedVersion
from tests.hostile.frames.forging import ZEROS, forged, refused, sealed

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("version", [0, 2, 255])
def test_other_versions_are_refused(version: int) -> None:
    refused(sealed(b"SV" + bytes((version,)) + forged(ZEROS)[3:-4]), UnsupportedVersion)
