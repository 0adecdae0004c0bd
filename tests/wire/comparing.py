"""Equality of messages to the last bit, and switching the kernels off."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from peer import native
from peer.compress.payload import Dense, LayerPayload, Levels
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


def payloads_equal(a: LayerPayload, b: LayerPayload) -> bool:
    """Return whether two payloads are the same to the last bit (types and array dtypes included)."""
    if type(a) is not type(b):
        return False
    for name in a.__dataclass_fields__:
        left, right = getattr(a, name), getattr(b, name)
        if isinstance(left, np.ndarray):
            # tobytes: so that −0.0 differs from 0.0, which arithmetic comparison would hide.
            if left.dtype != right.dtype or left.shape != right.shape or left.tobytes() != right.tobytes():
                return False
        elif isinstance(left, (Dense, Levels)):
            if not payloads_equal(left, right):
                return False
        elif left != right:
            return False
    return True


@contextmanager
def pure() -> Iterator[None]:
    """Do without the native kernels."""
    lib, native.lib = native.lib, None
    try:
        yield
    finally:
        native.lib = lib
