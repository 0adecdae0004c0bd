"""The checksum of a frame: CRC-32 as zlib, gzip and PNG have it."""

from __future__ import annotations

import zlib

from peer import native

_LONG = 1 << 10
"""Bytes below which a call of zlib costs less than what a kernel saves."""
_IS_FAST = native.lib is not None and bool(native.lib.wire_crc32_is_fast())


def crc32(data: bytes | memoryview, before: int = 0) -> int:
    """Return the checksum of `data`, which follows something with the checksum `before`."""
    if _IS_FAST and native.lib is not None and len(data) >= _LONG:
        return native.lib.wire_crc32(native.ffi.from_buffer("uint8_t[]", data), len(data), before)
    return zlib.crc32(data, before)
