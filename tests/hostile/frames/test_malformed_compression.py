"""What cannot be decompressed to the size it announces is refused."""

from __future__ import annotations

import pytest
import zstandard

from peer.wire.errors import MalformedCompression
from peer.wire.reader import varint
from tests.hostile.frames.forging import forged, levels, refused

pytestmark = pytest.mark.usefixtures("implementation")


def section(data: bytes) -> bytes:
    return forged(levels(varint(len(data)) + data, codec=2))


@pytest.mark.parametrize("data", [b"", b"\x00", b"garbage, not a frame of zstd", b"\x28\xb5\x2f\xfd"])
def test_bytes_that_are_no_compressed_section_are_refused(data: bytes) -> None:
    refused(section(data), MalformedCompression)


def test_a_section_cut_short_is_refused() -> None:
    whole = zstandard.ZstdCompressor().compress(bytes(range(8)))
    for length in range(8, len(whole)):
        refused(section(whole[:length]), MalformedCompression)


def test_a_second_section_behind_the_first_is_refused() -> None:
    whole = zstandard.ZstdCompressor().compress(bytes(8))
    refused(section(whole + whole), MalformedCompression)


def test_a_window_beyond_eight_mebibytes_is_refused() -> None:
    # A frame header by hand: a window of 2^27 bytes, a content size of 8, and one raw block of 8 bytes.
    header = b"\x28\xb5\x2f\xfd" + bytes((0b1100_0000, 17 << 3)) + (8).to_bytes(8, "little")
    block = (1 | 8 << 3).to_bytes(3, "little") + bytes(8)
    refused(section(header + block), MalformedCompression)
