from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import RemoteProtocolError
from peer.net import envelope as codec
from peer.net.envelope import Piece
from peer.proto.sottovoce.v1 import exchange_pb2 as pb

NUMBERS = st.one_of(st.integers(0, 300), st.integers(0, 2**63 - 1))
PIECES = st.lists(
    st.builds(Piece, NUMBERS, NUMBERS, NUMBERS, st.sampled_from([b"", b"x", b"d" * 127, b"d" * 128, b"d" * 20_000])),
    max_size=4,
)
ENVELOPES = st.builds(
    pb.Envelope,
    receipt=NUMBERS,
    credit=NUMBERS,
    bulletins=st.lists(st.builds(pb.Bulletin, topic=st.text(max_size=5), data=st.binary(max_size=30)), max_size=2),
)


def as_protobuf(envelope: pb.Envelope, pieces: list[Piece]) -> pb.Envelope:
    whole = pb.Envelope()
    whole.CopyFrom(envelope)
    for piece in pieces:
        whole.chunks.add(
            sequence=piece.sequence, offset=piece.offset, frame_bytes=piece.frame_bytes, data=bytes(piece.data)
        )
    return whole


@given(ENVELOPES, PIECES)
def test_what_is_written_is_protobuf(envelope: pb.Envelope, pieces: list[Piece]) -> None:
    assert pb.Envelope.FromString(codec.encode(envelope, pieces)) == as_protobuf(envelope, pieces)


@given(ENVELOPES, PIECES, st.booleans())
def test_what_protobuf_or_we_write_is_read(envelope: pb.Envelope, pieces: list[Piece], ours: bool) -> None:
    whole = as_protobuf(envelope, pieces)
    data = codec.encode(envelope, pieces) if ours else whole.SerializeToString()
    assert as_read(data) == whole


@given(st.binary(max_size=200), st.booleans())
def test_the_walk_and_the_generated_code_agree_on_any_bytes(noise: bytes, after: bool) -> None:
    """Fields in any order, unknown ones, broken ones: large envelopes mean what protobuf says they mean."""
    chunk = codec.encode(pb.Envelope(), [Piece(1, 0, 0, b"d" * 20_000)])
    data = chunk + noise if after else noise + chunk
    try:
        expected = pb.Envelope.FromString(data)
    except DecodeError:
        with pytest.raises(RemoteProtocolError):
            codec.decode(data)
        return
    expected.DiscardUnknownFields()
    assert as_read(data) == expected


@given(st.data())
def test_a_truncated_envelope_means_what_protobuf_says(data: st.DataObject) -> None:
    whole = codec.encode(pb.Envelope(receipt=5), [Piece(1, 0, 40_000, b"d" * 18_000), Piece(2, 0, 0, b"e" * 300)])
    cut = whole[: data.draw(st.integers(16_384, len(whole) - 1))]
    try:
        expected = pb.Envelope.FromString(cut)
    except DecodeError:
        with pytest.raises(RemoteProtocolError):
            codec.decode(cut)
    else:
        expected.DiscardUnknownFields()
        assert as_read(cut) == expected


def test_data_of_a_large_chunk_is_not_copied() -> None:
    data = codec.encode(pb.Envelope(), [Piece(1, 0, 0, bytes(100_000))])
    _, (piece,) = codec.decode(data)
    assert isinstance(piece.data, memoryview)
    assert piece.data.obj is data


def test_a_small_frame_costs_nine_bytes_of_envelope() -> None:
    assert len(codec.encode(pb.Envelope(), [Piece(1000, 0, 0, bytes(400))])) == 409


def as_read(data: bytes) -> pb.Envelope:
    envelope, pieces = codec.decode(data)
    del envelope.chunks[:]
    whole = as_protobuf(envelope, pieces)
    whole.DiscardUnknownFields()
    return whole
