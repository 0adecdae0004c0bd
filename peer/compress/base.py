"""The contract between algorithms and compressors, and the layer-by-layer driver of both."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from peer.compress.columns import Columns
from peer.compress.float_types import own_type
from peer.compress.layout import Layout
from peer.compress.payload import Dense, FloatArray, LayerPayload, Payload


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


class Compressor(Protocol):
    """Compresses one layer. A value: it holds settings only; anything that changes from round to round is an argument
    (θ) or a draw."""

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


@runtime_checkable
class AllAtOnce(Protocol):
    """A compressor that is faster on all layers of a vector than on each."""

    def compress_all(self, v: FloatArray, layout: Layout, draws: Draws) -> Columns | None:
        """Return the payloads that `compress` returns for every layer, to the bit, or None to be asked for each."""
        ...


@cache
def _is_all_at_once(kind: type) -> bool:
    """Return whether a class is an `AllAtOnce`. Cached, since the check takes longer than compressing a small model."""
    return issubclass(kind, AllAtOnce)


def compress_layers(
    compressor: Compressor, v: FloatArray | Iterable[FloatArray], layout: Layout, draws: Draws, *, whole_below: int = 0
) -> Payload:
    """Return the payload of every layer of the flat vector `v`, or of layers that come one by one: each has to stay as
    it is until the next one only.

    Layers of fewer than `whole_below` numbers are sent whole, in the float type of `v`: norm parameters and biases cost
    little and suffer most. Their cost is counted like any other.
    """
    if isinstance(v, np.ndarray) and whole_below == 0 and _is_all_at_once(type(compressor)):
        payload = cast(AllAtOnce, compressor).compress_all(v, layout, draws)
        if payload is not None:
            return payload
    layers = (v[part] for part in layout.slices) if isinstance(v, np.ndarray) else v
    return tuple(
        Dense(each.copy(), own_type(each)) if each.size < whole_below else compressor.compress(each, layer, draws)
        for layer, each in enumerate(layers)
    )
