"""The contract between algorithms and compressors, the draws and error bounds in it, and the layer-by-layer driver of
both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from peer.compress.columns import Columns
from peer.compress.float_types import are_floats, floats_of, own_type
from peer.compress.layout import Layout
from peer.compress.payload import Dense, FloatArray, Kept, LayerPayload, Payload
from peer.random import PeerDraws, Stream


class Draws(Protocol):
    """The random numbers of one peer in one round. They depend on nothing but their arguments, never on call order."""

    def own(self, layer: int, size: int, dtype: npt.DTypeLike) -> FloatArray:
        """Return `size` uniforms in [0, 1) that only this peer draws."""
        ...

    def shared(self, layer: int, size: int, dtype: npt.DTypeLike) -> FloatArray:
        """Return `size` uniforms in [0, 1) that every peer of the run draws alike in this round."""
        ...

    def words(self, layer: int, size: int) -> npt.NDArray[np.uint32]:
        """Return `size` random 32-bit words of this peer, independent of `own` (for drawing subsets)."""
        ...


def own_uniforms(draws: Draws, layer: int, v: FloatArray) -> FloatArray | Stream:
    """Return the peer's own uniforms for `v`: the stream in production, from which a kernel draws in place, recorded
    numbers in replay."""
    return draws.own_stream(layer) if isinstance(draws, PeerDraws) else draws.own(layer, v.size, v.dtype)


def shared_uniforms(draws: Draws, layer: int, v: FloatArray) -> FloatArray | Stream:
    """Return the uniforms for `v` that all peers share."""
    return draws.shared_stream(layer) if isinstance(draws, PeerDraws) else draws.shared(layer, v.size, v.dtype)


@dataclass(frozen=True, kw_only=True)
class ErrorBound:
    """Bounds on C(v) − v for one layer, as the papers' theorems need them; None if there is none of that kind."""

    contraction: float | None = None
    """δ in E‖C(v) − v‖² ≤ (1 − δ) ‖v‖² for every v; CHOCO and error feedback need δ > 0."""
    variance: float | None = None
    """ω in E‖C(v) − v‖² ≤ ω ‖v‖² for an unbiased C; DCD and ECD need it."""
    absolute: float | None = None
    """The largest error of any one coordinate, for any v."""


class Compressor(Protocol):
    """Compresses one layer. A value: it holds settings only; anything that changes from round to round is an argument
    (θ) or a draw.

    One that is faster on all layers of a vector than on each has a method `compress_all(v, layout, draws)`, which
    returns the payloads that `compress` returns for every layer, to the bit, as `Columns`, or None to be asked for
    each.
    """

    @property
    def kind(self) -> str:
        """The name under which `compress.build` finds it."""
        ...

    @property
    def unbiased(self) -> bool:
        """Whether E[decompress(compress(v))] = v."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether decompression needs the receiver's own vector (modulo codes)."""
        ...

    def compress(self, v: FloatArray, layer: int, draws: Draws) -> LayerPayload:
        """Return the payload of one layer. `v: float32[n]` or `float64[n]`, finite; it is not changed."""
        ...

    def bits_per_value(self, size: int) -> float:
        """Return the nominal bits that one of `size` coordinates of a float32 vector costs, before entropy coding and
        headers. Scales are left out; indices count with their bound log2 C(size, k)."""
        ...

    def error_bound(self, size: int) -> ErrorBound:
        """Return the bounds for a layer of `size` numbers, rounding of the float type left aside."""
        ...


def compress_layers(
    compressor: Compressor, v: Kept | Iterable[FloatArray], layout: Layout, draws: Draws, *, whole_below: int = 0
) -> Payload:
    """Return the payload of every layer of the flat vector `v`, or of layers that come one by one: each has to stay as
    it is until the next one only.

    Layers of fewer than `whole_below` numbers are sent whole, in the float type of `v`: norm parameters and biases cost
    little and suffer most. Their cost is counted like any other.
    """
    compress_all: Callable[..., Columns | None] | None = getattr(compressor, "compress_all", None)
    if isinstance(v, np.ndarray) and are_floats(v) and whole_below == 0 and compress_all is not None:
        payload = compress_all(v, layout, draws)
        if payload is not None:
            return payload
    layers = (floats_of(v[part]) for part in layout.slices) if isinstance(v, np.ndarray) else v
    return tuple(
        Dense(each.copy(), own_type(each)) if each.size < whole_below else compressor.compress(each, layer, draws)
        for layer, each in enumerate(layers)
    )
