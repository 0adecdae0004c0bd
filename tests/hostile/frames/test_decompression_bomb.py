"""A compressed section announces just the bytes of its layer."""

from __future__ import annotations

import pytest
import zstandard

from peer.compress.layout import Layout
from peer.wire.errors import DecompressionBomb
from peer.wire.reader import varint
from tests.hostile.frames.forging import forged, levels, refused

pytestmark = pytest.mark.usefixtures("implementation")


def compressed(plain: bytes, **options: bool) -> bytes:
    data = zstandard.ZstdCompressor(**options).compress(plain)
    return varint(len(data)) + data


@pytest.mark.parametrize("size", [0, 7, 9, 10_000_000])
def test_another_size_than_the_layers_is_refused_before_anything_is_decompressed(size: int) -> None:
    # A layout in which a frame of this length is nothing special, and a first layer that is as small as ever.
    layout = Layout.of_sizes([8, 1000])
    refused(forged(levels(compressed(bytes(size)), codec=2), count=b"\x02"), DecompressionBomb, layout)


def test_a_section_that_does_not_tell_its_size_is_refused() -> None:
    refused(forged(levels(compressed(bytes(8), write_content_size=False), codec=2)), DecompressionBomb)


def test_a_section_that_announces_terabytes_is_refused() -> None:
    # A frame header by hand: magic, a content size of eight bytes, a window of one kilobyte.
    header = b"\x28\xb5\x2f\xfd\xc0\x00" + (2**42).to_bytes(8, "little")
    refused(forged(levels(varint(len(header)) + header, codec=2)), DecompressionBomb)
