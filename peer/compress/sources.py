"""Draws of compressors: an array, or a stream from which a kernel draws in place."""

from __future__ import annotations

from peer.compress.base import Draws
from peer.compress.payload import FloatArray
from peer.random import PeerDraws, Stream


def own_uniforms(draws: Draws, layer: int, v: FloatArray) -> FloatArray | Stream:
    """Return the peer's own uniforms for `v`: the stream in production, recorded numbers in replay."""
    return draws.own_stream(layer) if isinstance(draws, PeerDraws) else draws.own(layer, v.size, v.dtype)


def shared_uniforms(draws: Draws, layer: int, v: FloatArray) -> FloatArray | Stream:
    """Return the uniforms for `v` that all peers share."""
    return draws.shared_stream(layer) if isinstance(draws, PeerDraws) else draws.shared(layer, v.size, v.dtype)
