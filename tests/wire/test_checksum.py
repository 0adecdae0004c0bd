"""The checksum by products of polynomials is that of zlib."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest

from peer import native
from peer.compress.layout import Layout
from peer.compress.payload import Dense, ValueType
from peer.wire import Message, MessageKind, checksum, decode, encode
from peer.wire.checksum import crc32
from peer.wire.errors import ChecksumMismatch
from tests.wire.comparing import assert_same


@pytest.mark.skipif(native.lib is None, reason="the native kernels were not built")
def test_the_kernel_returns_the_checksum_of_zlib_for_every_length_and_beginning() -> None:
    chance = random.Random(1)
    assert native.lib is not None
    for size in [*range(200), *range(500, 800, 7), 1023, 1024, 1025, 65_536, 70_001]:
        data, before = chance.randbytes(size + 3), chance.getrandbits(32)
        for at in (0, 1, 3):
            piece = memoryview(data)[at : at + size]
            found = native.lib.wire_crc32(native.ffi.from_buffer("uint8_t[]", piece), size, before)
            assert found == zlib.crc32(piece, before)


@pytest.mark.parametrize("size", [0, 5, 1023, 1024, 5000])
def test_parts_give_the_checksum_of_the_whole(size: int) -> None:
    data = random.Random(2).randbytes(size)
    assert crc32(memoryview(data)[size // 3 :], crc32(data[: size // 3])) == zlib.crc32(data)


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_frame_is_read_and_a_spoiled_one_refused_whoever_computes_the_checksum(
    is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum, "IS_FAST", is_fast and checksum.IS_FAST)
    layout = Layout.of_sizes([300, 5])
    layers = tuple(Dense(np.linspace(0, 1, size, dtype=np.float32), ValueType.FLOAT32) for size in layout.sizes)
    message = Message(MessageKind.GOSSIP, 1, 1, layers=layers)
    frame = encode(message, layout)
    assert_same(decode(frame, layout), message)
    for at in (5, len(frame) // 2, len(frame) - 1):
        spoiled = bytearray(frame)
        spoiled[at] ^= 1
        with pytest.raises(ChecksumMismatch):
            decode(spoiled, layout)
