"""Bounds of the numbers in a message that keep every sum of them within the float type.

P peers add up their messages, and compressors are given differences of two such sums: four times P numbers of that size
are still finite. Models of that size have diverged long ago. A sender ends its run with that error rather than send
numbers that all others refuse; the divergence guard says when a model grew too large to be of use.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from peer.compress import block_float
from peer.compress.columns import Columns
from peer.compress.payload import Dense, LayerPayload, Levels, Residues, Sparse
from peer.gossip.base import NodeContext
from peer.wire.message import Message, MessageKind


def largest_value(dtype: npt.DTypeLike, node: NodeContext) -> float:
    """Return the largest magnitude of a number that is sent in this run."""
    return float(np.finfo(np.dtype(dtype)).max) / (4.0 * node.schedule.num_first)


def excess(message: Message, dtype: npt.DTypeLike, node: NodeContext, *, of_factors: bool = False) -> float | None:
    """Return the largest magnitude in a message if it is too large to be sent; None if not. A push-sum weight below 1,
    by which the numbers will be divided, counts too. `of_factors`: whether it is in block floating point."""
    limit = largest_value(dtype, node) * min(1.0, message.push_weight)
    layers = message.layers
    if message.kind is MessageKind.PART and of_factors:
        largest = _magnitude_of_part(message)
    elif isinstance(layers, Columns):
        largest = layers.largest
    else:
        largest = max(map(_magnitude, layers), default=0.0)
    return None if largest <= limit else largest


def _magnitude_of_part(message: Message) -> float:
    """Return a bound of |v| over the numbers of a part; its form was checked."""
    exponents, codes = message.layers
    assert isinstance(exponents, Levels)
    assert isinstance(codes, Levels)
    return block_float.bound((exponents, codes))


def _magnitude(layer: LayerPayload) -> float:
    """Return a bound of |v| over the values of a layer; θ of a modulo code, which is a distance between values. Repairs
    belong to a code, and are checked with it."""
    if isinstance(layer, Dense):
        return layer.magnitude
    if isinstance(layer, Levels):
        highest = layer.base + layer.step * ((1 << layer.bits) - 1)
        return abs(layer.scale) * max(abs(layer.base), abs(highest)) / layer.divisor
    if isinstance(layer, Sparse):
        return _magnitude(layer.values)
    return layer.theta if isinstance(layer, Residues) else 0.0
