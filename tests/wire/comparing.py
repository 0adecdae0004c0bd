"""Equality of messages to the last bit, and switching the kernels off."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from peer import native
from peer.compress.payload import payloads_equal
from peer.wire import Message


def assert_same(left: Message, right: Message) -> None:
    """Fail unless the two messages agree in every bit."""
    for name in ("kind", "sender", "round", "phase", "layer_ids", "wanted"):
        assert getattr(left, name) == getattr(right, name), name
    for name in ("mixing_weight", "push_weight"):
        assert struct.pack("<d", getattr(left, name)) == struct.pack("<d", getattr(right, name)), name
    assert len(left.layers) == len(right.layers)
    for number, (a, b) in enumerate(zip(left.layers, right.layers, strict=True)):
        assert payloads_equal(a, b), f"layer {number}: {a} became {b}"


@contextmanager
def pure() -> Iterator[None]:
    """Do without the native kernels."""
    lib, native.lib = native.lib, None
    try:
        yield
    finally:
        native.lib = lib
