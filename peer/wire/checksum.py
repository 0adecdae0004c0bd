"""The checksum of a frame: CRC-32 as in zlib, gzip and PNG."""

from __future__ import annotations

import zlib

from peer import native

BYTES = 4
"""Length of the checksum, which ends the frame."""
IS_FAST = native.lib is not None and bool(native.lib.wire_crc32_is_fast())
"""Whether the kernels compute it faster than zlib."""
_LONG = 1 << 10
"""Bytes below which a call of a kernel costs more than it saves over zlib."""


def crc32(data: bytes | memoryview, before: int = 0) -> int:
    """Return the checksum of `data`, which follows bytes with the checksum `before`."""
    if IS_FAST and native.lib is not None and len(data) >= _LONG:
        return native.lib.wire_crc32(native.ffi.from_buffer("uint8_t[]", data), len(data), before)
    return zlib.crc32(data, before)


def is_right(frame: memoryview) -> bool:
    """Return whether a frame ends with the checksum of the bytes before it."""
    return crc32(frame[:-BYTES]) == int.from_bytes(frame[-BYTES:], "little")
