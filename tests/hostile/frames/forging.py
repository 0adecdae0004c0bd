"""Frames that lie: built byte by byte, so that nothing of the writer's honesty is in them."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest

from peer.compress.layout import Layout
from peer.errors import FrameError
from peer.wire import decode

ONE = Layout.of_sizes([8])
"""A layout of one layer of eight numbers."""
TWO = Layout.of_sizes([8, 40])

ZEROS = b"\x08" + bytes(32)
"""An honest section: eight float32 zeros, packed."""


def sealed(body: bytes) -> bytes:
    """Return the bytes with their checksum."""
    return body + zlib.crc32(body).to_bytes(4, "little")


def forged(
    *sections: bytes,
    kind: int = 0,
    names: bytes = b"\x01\x02\x00",
    weights: bytes = b"\x04\x02",
    earlier: bytes = b"",
    count: bytes | None = None,
) -> bytes:
    """Return a frame of round 2 from peer 1, mixing weight 1/3 and push weight 1, with any bytes in the place of any
    field. `kind` holds the flags, too; `earlier` stands between weights and count."""
    header = b"SV\x01" + bytes((kind,)) + names + weights + earlier
    return sealed(header + (bytes((len(sections),)) if count is None else count) + b"".join(sections))


def levels(codes: bytes, *, bits: int = 4, tail: bytes = b"\x07\x0d\x01", scale: float = 1.0, codec: int = 0) -> bytes:
    """Return a section of levels; `tail` holds divisor 7, base −7 and step 1."""
    return bytes((1 | codec << 6, bits - 1)) + tail + struct.pack("<f", scale) + codes


def sparse(code: int, k: bytes, rest: bytes) -> bytes:
    return bytes((2 | code << 3,)) + k + rest


def residues(codes: bytes, *, form: int = 7, theta: float = 2.0, tag: int = 3) -> bytes:
    """Return a section of residues: eight bits, rounded to the nearest, without a check."""
    return bytes((tag, form)) + struct.pack("<f", theta) + codes


def refused(frame: bytes, error: type[FrameError], layout: Layout = ONE, **circumstances: Any) -> None:
    """Fail unless decoding raises exactly this error, with a sentence."""
    with pytest.raises(FrameError) as caught:
        decode(frame, layout, **circumstances)
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {caught.value}"
    assert len(str(caught.value)) > 20
