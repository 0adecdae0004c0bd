"""Changes of the members as bytes and back: see `proto/sottovoce/v1/membership.proto`.

Checks the form alone. Identities of newcomers and proofs are checked where certificates are known.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from peer.errors import RemoteProtocolError, SecurityError
from peer.gossip.incarnations import MAX_INCARNATIONS, MAX_NEWCOMERS
from peer.gossip.membership import Change, ChangeKind, Newcomer
from peer.node.statements import MAX_PROOF_BYTES, unsealed
from peer.node.told import MAX_NOTE_BYTES
from peer.proto.sottovoce.v1 import membership_pb2 as pb

MAGIC = b"SM"
_MAX_BYTES = 64
_MAX_INTRODUCTION_BYTES = 8 * 1024
_MAX_VOTE_BYTES = 2 * 1024
_MAX_EQUIVOCATION_BYTES = 2 * (MAX_NOTE_BYTES + MAX_PROOF_BYTES)
_MAX_ROUND = 1 << 62


def is_notice(frame: bytes) -> bool:
    """Return whether a frame claims to tell of a change of members rather than to be part of the gossip."""
    return frame[: len(MAGIC)] == MAGIC


def encode(change: Change) -> bytes:
    """Return the frame that tells of a change; if it carries its issuer's proof, as it came."""
    if change.told:
        return change.told
    message = pb.MembershipChange(
        kind=change.kind.value,  # type: ignore[arg-type]
        subject=change.subject,
        issuer=change.issuer,
        effective_round=change.effective,
        heard_round=change.heard_round,
        introduction=None if change.newcomer is None else _introduction(change.newcomer),
        votes=change.votes,
        order=change.ordered,
        admission=change.admitted,
        equivocation=change.equivocation,
    )
    return MAGIC + message.SerializeToString(deterministic=True)


def max_bytes(num_peers: int) -> int:
    """Return the greatest length of a frame that tells of a change among so many peers."""
    grounds = num_peers * _MAX_VOTE_BYTES + _MAX_EQUIVOCATION_BYTES
    return _MAX_BYTES + _MAX_INTRODUCTION_BYTES + MAX_PROOF_BYTES + grounds


def decode(frame: bytes, num_peers: int, *, sender: int) -> Change:
    """Return the change that a frame from a neighbour tells of. Raises RemoteProtocolError, which names the sender."""
    if len(frame) > max_bytes(num_peers):
        raise RemoteProtocolError(f"told of a change of members in {len(frame)} bytes", peer=sender)
    try:
        statement, proof = unsealed(frame[len(MAGIC) :])
        message = pb.MembershipChange.FromString(statement)
        kind = ChangeKind(message.kind)
    except (DecodeError, ValueError, SecurityError):
        raise RemoteProtocolError("told of a change of members that makes no sense", peer=sender) from None
    newcomer = None
    if message.HasField("introduction"):
        newcomer = _newcomer(message.introduction, sender=sender)
    change = Change(
        kind,
        message.subject,
        message.issuer,
        message.effective_round,
        message.heard_round,
        newcomer,
        b"" if proof is None else frame,
        tuple(message.votes),
        message.order,
        message.admission,
        tuple(message.equivocation),
    )
    # The validity of these numbers is judged where the number of listed peers is known.
    most = num_peers if newcomer is None else (num_peers + MAX_NEWCOMERS) * MAX_INCARNATIONS
    if change.subject >= most or change.issuer >= num_peers or not 0 < change.effective < _MAX_ROUND:
        raise RemoteProtocolError(
            f"told of a change of peer {change.subject} by peer {change.issuer} from round {change.effective} on, "
            f"where there are {num_peers} peers",
            peer=sender,
        )
    if change.has_grounds and kind is not ChangeKind.LOST:
        raise RemoteProtocolError(f"told of votes on the {kind.name} of peer {change.subject}", peer=sender)
    if (kind is ChangeKind.LEAVE) != (change.subject == change.issuer) or (newcomer and kind is not ChangeKind.JOIN):
        raise RemoteProtocolError(
            f"told that peer {change.issuer} says that peer {change.subject} changes by {kind.name}", peer=sender
        )
    return change


def encode_newcomer(newcomer: Newcomer) -> bytes:
    """Return the note in which a peer that is in nobody's list but its own gives its identity."""
    return _introduction(newcomer).SerializeToString(deterministic=True)


def decode_newcomer(note: bytes, *, sender: int) -> Newcomer:
    """Return the identity that a peer gives. Raises RemoteProtocolError, which names it."""
    try:
        if len(note) > _MAX_INTRODUCTION_BYTES:
            raise ValueError
        return _newcomer(pb.Introduction.FromString(note), sender=sender)
    except (DecodeError, ValueError):
        raise RemoteProtocolError("introduced itself in words that make no sense", peer=sender) from None


def _introduction(newcomer: Newcomer) -> pb.Introduction:
    return pb.Introduction(
        name=newcomer.name,
        advertise=newcomer.advertise or "",
        relay=newcomer.relay or "",
        certificate=newcomer.certificate,
    )


def _newcomer(message: pb.Introduction, *, sender: int) -> Newcomer:
    if message.ByteSize() > _MAX_INTRODUCTION_BYTES or not message.name:
        raise RemoteProtocolError(f"introduced a peer in {message.ByteSize()} bytes", peer=sender)
    return Newcomer(message.name, message.advertise or None, message.relay or None, message.certificate)
