"""Account of the bytes of a frame: what each section spends on its header, indices, values, scales and checks."""

from __future__ import annotations

from dataclasses import dataclass

from peer import wire
from peer.compress.layout import Layout
from peer.wire import checksum, section_reader
from peer.wire.message import Message, MessageKind


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
    """See `peer.wire.entropy_bound_bits`."""

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
    """Return the account of a frame's bytes. Raises the errors of `wire.decode`."""
    ledgers: list[section_reader.Ledger] = []
    message = wire.decode(frame, layout, previous=previous, ledgers=ledgers)
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
    bound = wire.entropy_bound_bits(message, previous=previous)
    pools = ledgers[-1].spent
    return FrameReport(
        message, size, ledgers[0].spent["header"], checksum.BYTES, layers, pools["indices"], pools["values"], bound
    )
