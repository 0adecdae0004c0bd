"""Small numbers of a frame, and a cursor that never leaves it."""

from __future__ import annotations

import struct

from peer.wire.errors import MalformedNumber, TruncatedFrame

MAX_VARINT = 2**64 - 1


def varint(value: int) -> bytes:
    """Return an unsigned LEB128 integer, 1 to 10 bytes."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def zigzag(value: int) -> int:
    """Return 0, 1, 2, 3, … for 0, −1, 1, −2, …"""
    return value * 2 if value >= 0 else -value * 2 - 1


def unzigzag(value: int) -> int:
    """Return the inverse of `zigzag`."""
    return -(value + 1 >> 1) if value & 1 else value >> 1


class Reader:
    """Reads a frame from front to back; a read across `end` raises `TruncatedFrame`."""

    def __init__(self, data: memoryview, start: int, end: int) -> None:
        self.data, self.position, self.end = data, start, end

    @property
    def left(self) -> int:
        return self.end - self.position

    def take(self, size: int) -> memoryview:
        """Return the next `size` bytes without copying them."""
        start = self.position
        if size > self.end - start:
            raise TruncatedFrame(f"the frame ends {size - self.end + start} bytes short of a section's end")
        self.position = start + size
        return self.data[start : start + size]

    def byte(self) -> int:
        start = self.position
        if start >= self.end:
            raise TruncatedFrame("the frame ends before its last field")
        self.position = start + 1
        return self.data[start]

    def varint(self) -> int:
        # Nearly all take one byte, which is not worth another call.
        start = self.position
        if start < self.end and (first := self.data[start]) < 0x80:
            self.position = start + 1
            return first
        value, shift = self.byte() & 0x7F, 7
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 63:
                raise MalformedNumber("a variable-length integer does not end within 10 bytes")
        if byte == 0 or value > MAX_VARINT:
            raise MalformedNumber("a variable-length integer is not in its shortest form or exceeds 64 bits")
        return value

    def float32(self) -> float:
        result: float = struct.unpack("<f", self.take(4))[0]
        return result

    def float64(self) -> float:
        result: float = struct.unpack("<d", self.take(8))[0]
        return result

    def word64(self) -> int:
        return int.from_bytes(self.take(8), "little")
