"""Account of the bytes of a frame, and the fewest that could have carried it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from peer.compress.layout import Layout
from peer.compress.payload import Dense, LayerPayload, MoreBits, Residues, Sparse, ValueType, WholeIntegers
from peer.wire import checksum, section_reader, section_writer, sections
from peer.wire.bits import UnsignedArray
from peer.wire.frame import decode
from peer.wire.message import Message, MessageKind
from peer.wire.plans import entropy_of
from peer.wire.tokens import counts

_VALUE_BITS = {ValueType.FLOAT64: 64, ValueType.FLOAT32: 32, ValueType.BFLOAT16: 16, ValueType.FLOAT16: 16}
_PIECE = 1 << 16
_FEW = 256


@dataclass(frozen=True)
class LayerReport:
    """The bytes of one section."""

    name: str
    payload: str
    """Name of the payload's type."""
    codecs: tuple[str, ...]
    """Codecs of indices (if there are any) and values."""
    header_bytes: int
    index_bytes: int
    value_bytes: int
    scale_bytes: int
    """Bytes of scales and θ."""
    check_bytes: int
    """Bytes of hashes of modulo codes."""


@dataclass(frozen=True)
class FrameReport:
    """The bytes of one frame."""

    message: Message
    frame_bytes: int
    header_bytes: int
    """Bytes up to the first section."""
    checksum_bytes: int
    layers: tuple[LayerReport, ...]
    pooled_index_bytes: int
    pooled_value_bytes: int
    """Bytes of indices and codes of small layers, which are sent together; their layers' codec is called pooled."""
    bound_bits: float
    """See `entropy_bound_bits`."""

    @property
    def payload_bytes(self) -> int:
        """Indices, values, scales and checks: the frame without its headers and checksum."""
        return self.index_bytes + self.value_bytes + sum(layer.scale_bytes + layer.check_bytes for layer in self.layers)

    @property
    def index_bytes(self) -> int:
        """Bytes of the indices of coordinates."""
        return self.pooled_index_bytes + sum(layer.index_bytes for layer in self.layers)

    @property
    def value_bytes(self) -> int:
        """Bytes of codes, residues and reals; scales, θ and checks are not among them."""
        return self.pooled_value_bytes + sum(layer.value_bytes for layer in self.layers)

    @property
    def overhead_bytes(self) -> int:
        """Headers and checksum."""
        return self.frame_bytes - self.payload_bytes


def describe(frame: bytes | bytearray | memoryview, layout: Layout, *, previous: Message | None = None) -> FrameReport:
    """Return the account of a frame's bytes. Raises the errors of `decode`."""
    ledgers: list[section_reader.Ledger] = []
    message = decode(frame, layout, previous=previous, ledgers=ledgers)
    if message.kind is MessageKind.PART:
        names = [f"section {number}" for number in range(len(message.layers))]
    else:
        numbers = range(len(message.layers)) if message.layer_ids is None else message.layer_ids
        names = [layout.names[number] for number in numbers]
    layers = tuple(
        LayerReport(
            name=name,
            payload=type(payload).__name__,
            codecs=tuple(ledger.codecs),
            header_bytes=ledger.spent.get("header", 0),
            index_bytes=ledger.spent.get("indices", 0),
            value_bytes=ledger.spent.get("values", 0),
            scale_bytes=ledger.spent.get("scales", 0),
            check_bytes=ledger.spent.get("checks", 0),
        )
        for name, payload, ledger in zip(names, message.layers, ledgers[1:-1], strict=True)
    )
    size = memoryview(frame).nbytes
    bound = entropy_bound_bits(message, previous=previous)
    pools = ledgers[-1].spent
    return FrameReport(
        message, size, ledgers[0].spent["header"], checksum.BYTES, layers, pools["indices"], pools["values"], bound
    )


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
    total, few = 0.0, _Few({}, {})
    for layer, before in zip(message.layers, earlier, strict=True):
        total += _bound(layer, before, scalar_bits, few)
    for width, codes in few.codes.items():
        joined = _code_bits(np.concatenate(codes), width)
        total += min(joined, _code_bits(np.concatenate(few.changes[width]), width))
    return total


@dataclass(frozen=True)
class _Few:
    """The codes of small layers by their bits, and their changes (the codes again where there is no earlier one)."""

    codes: dict[int, list[UnsignedArray]]
    changes: dict[int, list[UnsignedArray]]


def _bound(layer: LayerPayload, previous: LayerPayload | None, scalar_bits: int, few: _Few) -> float:
    """Return the bits of a layer, without those of codes that it adds to `few`."""
    if isinstance(layer, Dense):
        return float(layer.values.size * _VALUE_BITS[layer.value_type])
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
        few.codes.setdefault(layer.bits, []).append(codes)
        few.changes.setdefault(layer.bits, []).append(change)
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
