"""Changes of the members as bytes and back: see `proto/sottovoce/v1/membership.proto`."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from peer.errors import RemoteProtocolError
from peer.gossip.membership import Change, ChangeKind
from peer.proto.sottovoce.v1 import membership_pb2 as pb

_MAGIC = b"SM"
_MAX_BYTES = 64
_MAX_ROUND = 1 << 62


def is_notice(frame: bytes) -> bool:
    """Return whether a frame claims to tell of a change of members rather than to be part of the gossip."""
    return frame[: len(_MAGIC)] == _MAGIC


def encode(change: Change) -> bytes:
    """Return the frame that tells of a change."""
    message = pb.MembershipChange(
        kind=change.kind.value,  # type: ignore[arg-type]
        subject=change.subject,
        issuer=change.issuer,
        effective_round=change.effective,
        heard_round=change.heard_round,
    )
    return _MAGIC + message.SerializeToString(deterministic=True)


def decode(frame: bytes, num_peers: int, *, sender: int) -> Change:
    """Return the change that a frame from a neighbour tells of. Raises RemoteProtocolError, which names the sender."""
    if len(frame) > _MAX_BYTES:
        raise RemoteProtocolError(f"told of a change of members in {len(frame)} bytes", peer=sender)
    try:
        message = pb.MembershipChange.FromString(frame[len(_MAGIC) :])
        kind = ChangeKind(message.kind)
    except (DecodeError, ValueError):
        raise RemoteProtocolError("told of a change of members that makes no sense", peer=sender) from None
    change = Change(kind, message.subject, message.issuer, message.effective_round, message.heard_round)
    if max(change.subject, change.issuer) >= num_peers or not 0 < change.effective < _MAX_ROUND:
        raise RemoteProtocolError(
            f"told of a change of peer {change.subject} by peer {change.issuer} from round {change.effective} on, "
            f"where there are {num_peers} peers",
            peer=sender,
        )
    if (kind is ChangeKind.LEAVE) != (change.subject == change.issuer):
        raise RemoteProtocolError(
            f"told that peer {change.issuer} says that peer {change.subject} changes by {kind.name}", peer=sender
        )
    return change
