"""Notes as bytes: what an honest peer says comes back, and nothing else is believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from google.protobuf.message import Message

from peer.daemon.notes.notes import (
    decode_data,
    decode_digests,
    decode_divergence,
    decode_evaluation,
    decode_refusal,
    encode_data,
    encode_digests,
    encode_divergence,
    encode_evaluation,
    encode_refusal,
)
from peer.errors import RemoteProtocolError
from peer.proto.sottovoce.v1 import note_pb2 as pb
from peer.state.metrics import EvaluationRecord

ROUNDS = 100
TEST = pb.EvaluationNote.TEST


def test_an_evaluation_comes_back_as_it_was_measured() -> None:
    for split in ("test", "holdout"):
        told = EvaluationRecord(peer=3, round=20, split=split, correct=(5, 0), total=(10, 2))
        assert decode_evaluation(encode_evaluation(told), ROUNDS) == told


def test_metrics_of_the_task_are_told_in_the_order_of_its_code() -> None:
    plain = EvaluationRecord(peer=3, round=20, split="test", correct=(5, 0), total=(10, 2))
    told = replace(plain, metrics={"RMSE": 0.5, "F1": float("inf")})
    assert decode_evaluation(encode_evaluation(told), ROUNDS, ("RMSE", "F1")) == told
    for others in ((), ("RMSE",), ("RMSE", "F1", "recall")):
        assert decode_evaluation(encode_evaluation(told), ROUNDS, others) == plain, "another version of the code"
    assert decode_evaluation(encode_evaluation(plain), ROUNDS, ("RMSE", "F1")) == plain, "an earlier release"


def test_of_very_many_classes_the_sum_is_told() -> None:
    many = EvaluationRecord(peer=1, round=20, split="test", correct=(1,) * 5000, total=(2,) * 5000)
    heard = decode_evaluation(encode_evaluation(many), ROUNDS)
    assert (heard.correct, heard.total, heard.accuracy) == ((5000,), (10000,), 0.5)


def test_a_divergence_comes_back_short_and_printable() -> None:
    note = encode_divergence(2, 30, "\x1b[2Jgone\n" + "x" * 10_000)
    peer, round_, reason = decode_divergence(note, ROUNDS)
    assert (peer, round_) == (2, 30)
    assert reason.startswith(" [2Jgone xxx")
    assert len(reason) == 500


def test_digests_and_refusals_come_back() -> None:
    assert decode_digests(encode_digests(16, (1, 2**64 - 1)), ROUNDS, 2) == (16, (1, 2**64 - 1))
    assert decode_data(encode_data(b"a" * 16, b"b" * 16)) == (b"a" * 16, b"b" * 16)
    assert decode_refusal(encode_refusal("it is\nabout to leave")) == "it is about to leave"


@pytest.mark.parametrize(
    ("note", "says"),
    [
        (pb.EvaluationNote(peer=1, round=20, correct=[1], total=[2]), "on split 0"),
        (pb.EvaluationNote(peer=1, round=20, split=TEST), "0 right of 0 classes"),
        (pb.EvaluationNote(peer=1, round=20, split=TEST, correct=[1, 2], total=[3]), "2 right of 1 classes"),
        (pb.EvaluationNote(peer=1, round=20, split=TEST, correct=[0] * 1001, total=[0] * 1001), "of 1001 classes"),
        (pb.EvaluationNote(peer=1, round=20, split=TEST, correct=[3], total=[2]), "counts are none"),
        (pb.EvaluationNote(peer=1, round=20, split=TEST, correct=[1], total=[2**53 + 1]), "counts are none"),
        (pb.EvaluationNote(peer=1, round=101, split=TEST, correct=[1], total=[2]), "the run has 100"),
        (pb.EvaluationNote(peer=1, round=2**63, split=TEST, correct=[1], total=[2]), "the run has 100"),
        (pb.EvaluationNote(peer=2**31, round=1, split=TEST, correct=[1], total=[2]), "told of peer 2147483648"),
    ],
)
def test_an_evaluation_that_no_honest_peer_passes_on_is_refused(note: Message, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        decode_evaluation(note.SerializeToString(), ROUNDS)


def test_other_impossible_notes_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="told of round 101 in a note"):
        decode_divergence(encode_divergence(1, 101, "why"), ROUNDS)
    with pytest.raises(RemoteProtocolError, match="told of peer 4294967295"):
        decode_divergence(encode_divergence(2**32 - 1, 1, "why"), ROUNDS)
    with pytest.raises(RemoteProtocolError, match="digests of 3 layers, where there are 2"):
        decode_digests(encode_digests(16, (1, 2, 3)), ROUNDS, 2)
    with pytest.raises(RemoteProtocolError, match="digests of its data of 16 and 15 bytes"):
        decode_data(encode_data(b"a" * 16, b"b" * 15))
    with pytest.raises(RemoteProtocolError, match="told of round 1000"):
        decode_digests(encode_digests(1000, (1, 2)), ROUNDS, 2)


READERS: list[Callable[[bytes], object]] = [
    lambda note: decode_evaluation(note, ROUNDS),
    lambda note: decode_divergence(note, ROUNDS),
    lambda note: decode_digests(note, ROUNDS, 2),
    decode_data,
    decode_refusal,
]


@pytest.mark.parametrize("read", READERS, ids=["evaluation", "divergence", "digests", "data", "refusal"])
@pytest.mark.parametrize(
    "note",
    [
        # What the release before sent, and what ended it.
        json.dumps([1, 20, "test", [1], [2]]).encode(),
        b'[1, 1e999, "test", [1], [2]]',
        b"[" * 60_000,
        b"\xff" * 20,
        # A length that is not there.
        b"\x0a\xff\xff\xff\xff\x0f",
        # Groups in groups, as deep as a note has room for.
        b"\x0b" * 60_000,
        # A number of more than 64 bits.
        b"\x08" + b"\xff" * 11 + b"\x01",
    ],
    ids=["json", "infinity", "nested-json", "noise", "cut-off", "nested-groups", "long-number"],
)
def test_bytes_that_are_no_note_are_refused(read: Callable[[bytes], object], note: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="that are no "):
        read(note)
