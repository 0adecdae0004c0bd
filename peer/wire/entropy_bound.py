"""The fewest bits that could have carried the layers of a message."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from peer.compress.payload import Dense, LayerPayload, MoreBits, Residues, Sparse, WholeIntegers
from peer.wire import section_writer, sections
from peer.wire.bits import UnsignedArray
from peer.wire.message import Message
from peer.wire.plans import entropy_of
from peer.wire.tokens import counts

_PIECE = 1 << 16
_FEW = 256

_Few = dict[int, list[tuple[UnsignedArray, UnsignedArray]]]
"""Bits → the codes of small layers, and their changes (the codes again where there is no earlier one)."""


def entropy_bound_bits(message: Message, *, previous: Message | None = None) -> float:
    """Return about the fewest bits that can carry the message's layers, headers left out.

    log₂ C(n, k) for k indices of n coordinates, although fewer suffice if they cluster; for codes their empirical
    entropy (of order 0), with `previous` the smaller of theirs and that of their change, at most b bits a number; the
    bits of its float type for every real, scale and θ; 64 bits for a check. Layers with fewer than 256 codes are taken
    together, by bits, for their entropy: that of a handful of codes is always near zero.
    """
    earlier: Sequence[LayerPayload | None] = (None,) * len(message.layers)
    if previous is not None and message.layer_ids is None and len(previous.layers) == len(message.layers):
        earlier = previous.layers
    scalar_bits = 64 if section_writer.needs_double(message.layers) else 32
    few: _Few = {}
    total = 0.0
    for layer, before in zip(message.layers, earlier, strict=True):
        total += _bound(layer, before, scalar_bits, few)
    for width, pairs in few.items():
        total += min(_code_bits(np.concatenate(arrays), width) for arrays in zip(*pairs, strict=True))
    return total


def _bound(layer: LayerPayload, previous: LayerPayload | None, scalar_bits: int, few: _Few) -> float:
    """Return the bits of a layer, without those of codes that it adds to `few`."""
    if isinstance(layer, Dense):
        return float(layer.values.size * sections.FORMATS[layer.value_type][0])
    if isinstance(layer, Sparse):
        return log2_choose(layer.size, layer.indices.size) + _bound(layer.values, None, scalar_bits, few)
    if isinstance(layer, WholeIntegers):
        _, occurrences = np.unique(layer.integers, return_counts=True)
        return layer.integers.size * min(64.0, entropy_of(occurrences))
    codes = change = layer.residues if isinstance(layer, Residues) else layer.codes
    if isinstance(layer, Residues) and sections.predicts(previous, layer.bits, codes.size):
        assert isinstance(previous, Residues)
        change = sections.difference(codes, previous.residues, layer.bits)
    scalars = 0 if isinstance(layer, MoreBits) else scalar_bits
    if isinstance(layer, Residues) and layer.check is not None:
        scalars += 64
    if codes.size < _FEW:
        few.setdefault(layer.bits, []).append((codes, change))
        return scalars
    bits = _code_bits(codes, layer.bits)
    return scalars + (bits if change is codes else min(bits, _code_bits(change, layer.bits)))


def log2_choose(n: int, k: int) -> float:
    """Return log₂ C(n, k): the bits of a choice of k of n."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def _code_bits(codes: UnsignedArray, width: int) -> float:
    if codes.dtype == np.uint8:
        histogram = counts(codes)
    else:
        histogram = np.zeros(1 << width, np.int64)
        for start in range(0, codes.size, _PIECE):
            histogram += np.bincount(codes[start : start + _PIECE], minlength=1 << width)
    return codes.size * min(float(width), entropy_of(histogram))
