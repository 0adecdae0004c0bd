"""Notes as bytes and back: see `proto/sottovoce/v1/note.proto`.

Decoding makes the checks that need no knowledge of the run's data or its peers: the form, and that rounds are rounds of
the run. Everything that is wrong with a note raises RemoteProtocolError. An honest peer makes the same checks before it
passes a note on, so that the neighbour which sent it is to blame.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from peer.errors import RemoteProtocolError, SecurityError
from peer.foreign_text import printable
from peer.node.statements import Statements, unsealed
from peer.proto.sottovoce.v1 import note_pb2 as pb
from peer.rate_limits import Allowances
from peer.state.metrics import EvaluationRecord

EVALUATION = "evaluation"
DIVERGED = "diverged"
REPLICA = "replica"
JOIN = "join"
"""Topic of the note with which a peer asks to be let in; `node.membership_codec` knows its content."""
REFUSAL = "no join"
CLASSES = "classes"
CLASS_SHARES = "shares"
SHARE = "share"
AVERAGE = "average"
DATA = "data"
RELEASE = "release"

MOST_CLASSES = 1000
"""Most classes told one by one; beyond, only the sums are told."""
_MOST_SAMPLES = 1 << 53
"""More than any test set has; sums of so many classes stay integers that JSON, SQLite and floats can hold."""
_MILLION = 1_000_000
_MOST_PEERS = 1 << 31
_MOST_PROTOCOL = 1 << 16
_MOST_MS = 1 << 53
_LEAST_WEIGHT = 2.0**-126
"""The smallest push-sum weight of full precision in float32."""
_REASON_CHARACTERS = 500
SOFTWARE_CHARACTERS = 64
_DIGEST_BYTES = 16
_SHARES_DIGEST_BYTES = 32
CHUNK_MAGIC = b"SA"
"""What frames with a chunk of a share begin with, or with the request for one."""

_SPLITS = {"test": pb.EvaluationNote.TEST, "holdout": pb.EvaluationNote.HOLDOUT}
_SPLIT_NAMES = {value: name for name, value in _SPLITS.items()}

AnyNote = TypeVar("AnyNote", bound=Message)


@dataclass(frozen=True)
class Hearsay:
    """Decides whose word a note is that a neighbour passes on. It has all that the parts need which tell notes."""

    own: int
    """This peer, which listens to nobody about itself."""
    peers: Container[int]
    """Possible subjects of notes."""
    statements: Statements
    """Signs for this peer, and knows others' signed statements."""
    is_up: Callable[[int], bool]
    """Whether there is a link to a peer."""
    now: Callable[[], float]
    """The time, in seconds."""

    def teller(
        self,
        topic: str,
        note: bytes,
        subject: int,
        source: int,
        news: Allowances,
        *,
        about: Hashable = None,
        is_awaited: bool = False,
    ) -> int | None:
        """Return the peer that vouches for a note of neighbour `source` about `subject`: the subject where a proof says
        so, or else the neighbour. None if this peer does not listen to it.

        This peer listens to nobody about itself, nor about a peer that is not among `peers`, such as a newcomer that
        was not announced yet. Where nobody signs, a peer to which there is a link speaks for itself. A proof is checked
        only if the subject has a unit of `news` left: the check takes a tenth of a millisecond, and its subject can
        sign any number of notes. A note costs its subject nothing unless the subject is to blame for it. `about`: a
        part of the subject with units of its own; by default all notes about the subject share them. `is_awaited`: it
        is checked even without a unit. Raises RemoteProtocolError for a proof that is not the subject's: a peer that
        passes it on has seen that, too.
        """
        if subject == self.own or subject not in self.peers:
            return None
        key = subject if about is None else about
        is_paid = news.spend(key, self.now())
        if not is_paid and not is_awaited:
            return None
        try:
            is_proven = self._proven(topic, subject, note)
        except RemoteProtocolError:
            if is_paid:
                news.give_back(key)
            raise
        if is_proven:
            return subject
        if source == subject or (is_proven is False and not self.is_up(subject)):
            return source
        if is_paid:
            news.give_back(key)
        return None

    def is_signed(self, topic: str, subject: int, note: bytes, what: str) -> bool:
        """Return whether a note, said to be `what` of its subject, has a proof, where peers sign. Raises
        RemoteProtocolError for a proof that is not the subject's."""
        try:
            return self.statements.check(topic, subject, note)
        except SecurityError as error:
            raise RemoteProtocolError(f"told {what} of peer {subject} in its name: {error}") from None

    def _proven(self, topic: str, subject: int, note: bytes) -> bool | None:
        """Return whether a note proves that its subject said it; None where a note without a proof is believed of its
        subject alone. Raises RemoteProtocolError for a proof that is not the subject's."""
        proof: object = note
        try:
            _, proof = unsealed(note)
            return self.statements.check(topic, subject, note)
        except SecurityError as error:
            if proof is None:
                return None
            raise RemoteProtocolError(f"told of peer {subject} in its name: {error}") from None


def digest_of(told: Iterable[bytes]) -> bytes:
    """Return a digest of notes in this order, their lengths included."""
    digest = hashlib.sha256()
    for note in told:
        digest.update(len(note).to_bytes(4, "little") + note)
    return digest.digest()


def encode_evaluation(record: EvaluationRecord) -> bytes:
    """Return an evaluation as peers tell it to each other; of very many classes only the sum."""
    correct, total = record.correct, record.total
    if len(correct) > MOST_CLASSES:
        correct, total = (sum(correct),), (sum(total),)
    return pb.EvaluationNote(
        peer=record.peer,
        round=record.round,
        split=_SPLITS[record.split],
        correct=correct,
        total=total,
        metrics=record.metrics.values(),
    ).SerializeToString()


def decode_evaluation(note: bytes, rounds: int, metrics: Sequence[str] = ()) -> EvaluationRecord:
    """Read a note of `encode_evaluation`, in a run of so many rounds with a task of these `metrics`. Figures of another
    number of metrics come from another version of the task's code, and are left out."""
    message = _parse(pb.EvaluationNote, note, rounds)
    split = _SPLIT_NAMES.get(message.split)
    if split is None:
        raise RemoteProtocolError(f"told of an evaluation on split {message.split:d}, which there is not")
    correct, total = tuple(message.correct), tuple(message.total)
    if not 0 < len(total) <= MOST_CLASSES or len(correct) != len(total):
        raise RemoteProtocolError(f"told of {len(correct)} right of {len(total)} classes")
    if not all(c <= n <= _MOST_SAMPLES for c, n in zip(correct, total, strict=True)):
        raise RemoteProtocolError("told of an evaluation whose counts are none")
    figures = message.metrics if len(message.metrics) == len(metrics) else ()
    return EvaluationRecord(
        peer=message.peer,
        round=message.round,
        split=split,
        correct=correct,
        total=total,
        metrics=dict(zip(metrics, figures, strict=False)),
    )


def encode_divergence(peer: int, round_: int, reason: str) -> bytes:
    """Return the note of a peer that ends after so many rounds because going on makes no sense."""
    return pb.DivergenceNote(peer=peer, round=round_, reason=reason[:_REASON_CHARACTERS]).SerializeToString()


def decode_divergence(note: bytes, rounds: int) -> tuple[int, int, str]:
    """Return (peer, round, printable reason) of a note of `encode_divergence`, in a run of so many rounds."""
    message = _parse(pb.DivergenceNote, note, rounds)
    return message.peer, message.round, printable(message.reason)


def decode_release(note: bytes) -> pb.ReleaseNote:
    """Read a peer's note about its release, made printable."""
    told = _parse(pb.ReleaseNote, note)
    if not 0 < told.protocol_max < _MOST_PROTOCOL or told.said_ms >= _MOST_MS:
        raise RemoteProtocolError(f"told of version {told.protocol_max} of the protocol at {told.said_ms} ms")
    if len(told.software) > SOFTWARE_CHARACTERS:
        raise RemoteProtocolError(f"told of a release in {len(told.software)} characters")
    told.software = printable(told.software)
    return told


def class_vote(peer: int, counts: Sequence[int], *, tells_samples: bool) -> pb.ClassNote:
    """Return the vote of a peer with so many samples of each class, at least one in all: shares in millionths, and 0
    samples where every device counts alike. Rounding hides no class."""
    samples = sum(counts)
    shares = (max(1, round(_MILLION * count / samples)) if count else 0 for count in counts)
    return pb.ClassNote(peer=peer, shares=shares, samples=samples if tells_samples else 0)


def decode_class_vote(note: bytes, num_classes: int) -> pb.ClassNote:
    """Read a result of `class_vote`, in a run with so many classes."""
    vote = _parse(pb.ClassNote, note)
    if len(vote.shares) != num_classes:
        raise RemoteProtocolError(f"told shares of {len(vote.shares)} classes, where there are {num_classes}")
    # Each is rounded by less than 1.
    total = sum(vote.shares)
    if abs(total - _MILLION) > num_classes or vote.samples > _MOST_SAMPLES:
        raise RemoteProtocolError(f"told shares of classes that add up to {total}, of {vote.samples} samples")
    return vote


def encode_shares(peer: int, digest: bytes) -> bytes:
    """Return a peer's note about the votes that it has: their SHA-256."""
    return pb.SharesNote(peer=peer, digest=digest).SerializeToString()


def decode_shares(note: bytes) -> tuple[int, bytes]:
    """Return (peer, digest) of a note of `encode_shares`."""
    message = _parse(pb.SharesNote, note)
    if len(message.digest) != _SHARES_DIGEST_BYTES:
        raise RemoteProtocolError(f"told a digest of votes of {len(message.digest)} bytes")
    return message.peer, message.digest


def decode_share(note: bytes, rounds: int, num_chunks: int, most_weight: float | None) -> pb.ShareNote:
    """Read what a member of the last round puts into the average of all models after a run of so many rounds.
    `most_weight`: the largest possible weight; None where all weigh the same."""
    share = _parse(pb.ShareNote, note)
    _check_is_last(share.round, rounds)
    if len(share.digests) != num_chunks or any(len(each) != _DIGEST_BYTES for each in share.digests):
        raise RemoteProtocolError(f"told of a share in {len(share.digests)} chunks, where there are {num_chunks}")
    weight = share.weight
    if not (weight == 1.0 if most_weight is None else _LEAST_WEIGHT <= weight <= most_weight):
        raise RemoteProtocolError(f"told of a share that weighs {weight:g}, as no honest one does")
    return share


def decode_averaged(note: bytes, rounds: int) -> pb.AverageNote:
    """Read a peer's note about what it has of the average after a run of so many rounds."""
    told = _parse(pb.AverageNote, note)
    _check_is_last(told.round, rounds)
    if len(told.shares) != _SHARES_DIGEST_BYTES or len(told.file) not in (0, _SHARES_DIGEST_BYTES):
        raise RemoteProtocolError(f"told digests of the average of {len(told.shares)} and {len(told.file)} bytes")
    return told


def encode_chunk(chunk: pb.ShareChunk) -> bytes:
    """Return the frame of a chunk, or of a request for one."""
    return CHUNK_MAGIC + chunk.SerializeToString()


def decode_chunk(frame: bytes) -> pb.ShareChunk:
    """Read a frame of `encode_chunk`. There are no data in a request, and where the sender does not have them yet."""
    chunk = _parse(pb.ShareChunk, frame[len(CHUNK_MAGIC) :])
    if chunk.asks and chunk.data:
        raise RemoteProtocolError(f"asked for a chunk of a share with {len(chunk.data)} bytes of one")
    return chunk


def encode_digests(round_: int, digests: Sequence[int]) -> bytes:
    """Return the note of the sender's replica as it should be after its message of a round: XXH3-64 of each layer."""
    return pb.ReplicaNote(round=round_, digests=digests).SerializeToString()


def decode_digests(note: bytes, rounds: int, num_layers: int) -> tuple[int, tuple[int, ...]]:
    """Return (round, digest of each layer) of a note of `encode_digests`, in a run of so many rounds."""
    message = _parse(pb.ReplicaNote, note, rounds)
    if len(message.digests) != num_layers:
        raise RemoteProtocolError(f"told digests of {len(message.digests)} layers, where there are {num_layers}")
    return message.round, tuple(message.digests)


def encode_data(train: bytes, test: bytes) -> bytes:
    """Return which data a peer reads, as digests of 16 bytes."""
    return pb.DataNote(train_digest=train, test_digest=test).SerializeToString()


def decode_data(note: bytes) -> tuple[bytes, bytes]:
    """Return (training, test) of a note of `encode_data`."""
    message = _parse(pb.DataNote, note)
    digests = message.train_digest, message.test_digest
    if any(len(digest) != _DIGEST_BYTES for digest in digests):
        raise RemoteProtocolError(f"told digests of its data of {len(digests[0])} and {len(digests[1])} bytes")
    return digests


def encode_refusal(reason: str) -> bytes:
    """Return the answer of a peer that does not let another one join."""
    return pb.RefusalNote(reason=reason[:_REASON_CHARACTERS]).SerializeToString()


def decode_refusal(note: bytes) -> str:
    """Return the reason, printable."""
    return printable(_parse(pb.RefusalNote, note).reason)


def _parse(kind: type[AnyNote], note: bytes, rounds: int | None = None) -> AnyNote:
    """Return a note of a possible peer, without its proof and what this version does not know. `rounds`: rounds of the
    run, where the note names one of them."""
    try:
        message = kind.FromString(note)
    except DecodeError:
        raise RemoteProtocolError(f"sent {len(note)} bytes that are no {kind.DESCRIPTOR.name}") from None
    message.DiscardUnknownFields()
    peer, round_ = getattr(message, "owner", getattr(message, "peer", 0)), getattr(message, "round", 0)
    if peer >= _MOST_PEERS:
        raise RemoteProtocolError(f"told of peer {peer} in a note")
    if rounds is not None and round_ > rounds:
        raise RemoteProtocolError(f"told of round {round_} in a note, and the run has {rounds}")
    return message


def _check_is_last(round_: int, rounds: int) -> None:
    if round_ != rounds:
        raise RemoteProtocolError(f"told of the average after {round_} rounds, and the run has {rounds}")
