"""Integers fit their bits, and levels the integers that a float64 holds exactly."""

from __future__ import annotations

import pytest
import zstandard

from peer.wire.errors import LevelOutOfRange
from peer.wire.reader import varint
from tests.hostile.frames.forging import forged, levels, refused

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize(
    "tail",
    [
        b"\x07" + varint(2**54) + b"\x01",  # base 2^53
        b"\x07" + varint(2**64 - 1) + b"\x01",  # base −2^63
        b"\x07\x0d" + varint(2**53),  # 16 steps of 2^53
    ],
)
def test_levels_beyond_exact_integers_are_refused(tail: bytes) -> None:
    refused(forged(levels(bytes(4), tail=tail)), LevelOutOfRange)


@pytest.mark.parametrize("tokens", [17, 200, 256])
def test_more_tokens_than_the_integers_have_are_refused(tokens: int) -> None:
    stream = bytes((0, 8, 0, tokens - 1))
    refused(forged(levels(stream + bytes(20), codec=1)), LevelOutOfRange)


@pytest.mark.parametrize("code", [16, 255])
def test_decompressed_codes_that_exceed_their_bits_are_refused(code: int) -> None:
    packed = zstandard.ZstdCompressor().compress(bytes(7) + bytes((code,)))
    refused(forged(levels(varint(len(packed)) + packed, codec=2)), LevelOutOfRange)
