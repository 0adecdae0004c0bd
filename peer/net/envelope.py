"""Envelopes to bytes and back, without copying large chunks through protobuf.

The bytes are protobuf as `proto/sottovoce/v1/exchange.proto` defines it, and small envelopes simply go through the
generated code. In large ones that would copy each megabyte four times more than needed. There the data of a chunk is
placed behind a prefix (serialised messages may be concatenated: they merge), and found again by walking over the fields
that our own encoder writes. Envelopes of any other form are left to the generated code.
"""

from __future__ import annotations

from typing import NamedTuple

from google.protobuf.message import DecodeError

from peer.errors import RemoteProtocolError
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from peer.wire.reader import varint

_LARGE_BYTES = 16 * 1024

# Tags (field number, wire type) of Envelope and Chunk.
_CHUNK = 0x0A
_ENVELOPE_VARINTS = (0x10, 0x18)  # receipt, credit
_ENVELOPE_LENGTHS = (0x22, 0x2A, 0x32)  # bulletins, hello, close
_SEQUENCE, _DATA, _OFFSET, _FRAME_BYTES = 0x08, 0x12, 0x18, 0x20


class Piece(NamedTuple):
    """One chunk; see the message `Chunk` for the meaning of its fields."""

    sequence: int
    offset: int
    frame_bytes: int
    """0 where `data` is the whole frame."""
    data: bytes | memoryview


def encode(envelope: pb.Envelope, pieces: list[Piece]) -> bytes:
    """Return the bytes of an envelope (which holds no chunks yet) with `pieces` as its chunks."""
    parts: list[bytes | memoryview] = [envelope.SerializeToString()]
    for piece in pieces:
        numbers = pb.Chunk(sequence=piece.sequence, offset=piece.offset, frame_bytes=piece.frame_bytes)
        head = numbers.SerializeToString() + bytes((_DATA,)) + varint(len(piece.data))
        parts += (bytes((_CHUNK,)), varint(len(head) + len(piece.data)), head, piece.data)
    return b"".join(parts)


def decode(data: bytes) -> tuple[pb.Envelope, list[Piece]]:
    """Return an envelope and its chunks; those of a large one are views into `data`.

    The chunks need not be in the envelope too. Raises RemoteProtocolError if the bytes are no envelope.
    """
    if len(data) >= _LARGE_BYTES:
        try:
            return _walk(data)
        except _UnusualError:
            pass
    try:
        envelope = pb.Envelope.FromString(data)
    except DecodeError:
        raise RemoteProtocolError(f"it sent {len(data)} bytes that are no envelope") from None
    return envelope, [Piece(each.sequence, each.offset, each.frame_bytes, each.data) for each in envelope.chunks]


class _UnusualError(Exception):
    """Bytes that our encoder does not write; they may be valid all the same."""


def _walk(data: bytes) -> tuple[pb.Envelope, list[Piece]]:
    view = memoryview(data)
    rest: list[memoryview] = []
    pieces: list[Piece] = []
    at = 0
    while at < len(data):
        begin, tag = at, data[at]
        if tag in _ENVELOPE_VARINTS:
            _, at = _read_varint(data, at + 1, len(data))
            rest.append(view[begin:at])
            continue
        length, at = _read_varint(data, at + 1, len(data))
        if length > len(data) - at:
            raise _UnusualError
        if tag == _CHUNK:
            pieces.append(_walk_chunk(data, view, at, at + length))
        elif tag in _ENVELOPE_LENGTHS:
            rest.append(view[begin : at + length])
        else:
            raise _UnusualError
        at += length
    try:
        return pb.Envelope.FromString(b"".join(rest)), pieces
    except DecodeError:
        raise _UnusualError from None


def _walk_chunk(data: bytes, view: memoryview, at: int, end: int) -> Piece:
    numbers = {_SEQUENCE: 0, _OFFSET: 0, _FRAME_BYTES: 0}
    content = view[at:at]
    while at < end:
        tag = data[at]
        value, at = _read_varint(data, at + 1, end)
        if tag in numbers:
            numbers[tag] = value
        elif tag == _DATA and value <= end - at:
            content = view[at : at + value]
            at += value
        else:
            raise _UnusualError
    return Piece(numbers[_SEQUENCE], numbers[_OFFSET], numbers[_FRAME_BYTES], content)


def _read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number at a position and the position after it; nine bytes at most (63 bits)."""
    value = 0
    for shift in range(0, 63, 7):
        if at >= end:
            raise _UnusualError
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _UnusualError
