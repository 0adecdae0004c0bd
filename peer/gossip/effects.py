"""Effects: all that a call on a peer asks of its driver, in one value from the algorithm to the socket.

A session or a pair node returns `Effects` with messages. The participant encodes these as outgoing frames and adds the
record of a finished round; the durable peer journals the frames and numbers them; daemon and simulator send them, set
their timer to `wake_at` and look at the finished round. Nothing else is fetched from the state machines, so that no
order of fetching matters.

The order in which a driver performs effects: persist, then send, then look at the finished round, then set the timer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from peer.compress.payload import FloatArray
from peer.errors import LocalProtocolError, RemoteProtocolError
from peer.gossip.membership import Change
from peer.records import RoundRecord
from peer.wire.message import Message


class Send(NamedTuple):
    """A message and the peer that it is for."""

    receiver: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingFrame:
    """The bytes of a message or of a membership notice, and the peer that they are for."""

    receiver: int
    frame: bytes
    payload_bytes: int = 0
    is_numbered: bool = False
    """Whether the frame is kept until its receiver has it for good. Requests, repairs and everything between pairs
    are asked for again instead."""
    seq: int = 0
    """Its number on the stream to the receiver, once the durable peer has assigned it; 0 for frames without one."""
    told_in: tuple[int, int] | None = None
    """(round, phase) in which all receivers of the sender are to get the same bytes; None for other frames."""
    values: int = 0
    """Parameters that the message describes."""
    entropy_bits: float = 0.0
    """Lower bound of the payload, in the rounds in which it is taken; 0 in others."""


@dataclass(kw_only=True)
class Effects:
    """All that one call asks for. Fields that do not apply keep their defaults, but for `wake_at` and `open_request`:
    these hold from this call until the next one."""

    sends: list[Send] = field(default_factory=list)
    """Messages to be encoded. The participant replaces them by `frames`."""
    frames: list[OutgoingFrame] = field(default_factory=list)
    """In the order in which they are to be sent."""
    wake_at: float | None = None
    """When `timer` is to be called, in the clock of `now`; None: it has nothing to wait for."""
    duplicates: int = 0
    """Number of messages dropped because they were taken before or their round is over."""
    news: list[Change] = field(default_factory=list)
    """Membership changes that were not known before: there may be other neighbours now."""
    returned: list[tuple[int, Message]] = field(default_factory=list)
    """(lost peer, own message) whose mass came back to this peer, since the lost one never had it."""
    refused: list[RemoteProtocolError] = field(default_factory=list)
    """Errors of earlier messages that turned out to be none of an honest peer's. The messages are not kept; the links
    to the peers that the errors name are to be reset."""
    receipts: dict[int, int] = field(default_factory=dict)
    """Neighbour → up to which number its frames would survive a power cut here now."""

    finished: int | None = None
    """The round that this call completed. The fields after this one belong to it."""
    record: RoundRecord | None = None
    """The record of the finished round; the participant fills it in."""
    skipped: tuple[int, ...] = ()
    """Neighbours that the round went on without."""
    applied: tuple[tuple[int, int], ...] = ()
    """(round, sender) of the messages that the algorithm was given since the round before: this round's own, and late
    ones of earlier rounds."""
    given: tuple[int, ...] = ()
    """Peers that handed over mass or a model to this one at the end of the round."""
    settled_model: FloatArray | None = None
    """z as the algorithm left it, before members changed; None if they did not."""

    open_request: OutgoingFrame | None = None
    """Pairs: the own request without an answer, to be sent again whenever its receiver comes back."""
    mixed_with: int | None = None
    """Pairs: the peer with whom this side completed an exchange, so that x has changed."""
    retry_after_s: float | None = None
    """Pairs: the own request was refused as busy; initiate another one after so many seconds."""

    def extend(self, later: Effects) -> None:
        """Add the effects of a later call on the same peer, as if both had been one call. Not for pairs, whose calls
        stand alone."""
        self.sends += later.sends
        self.frames += later.frames
        self.wake_at, self.open_request = later.wake_at, later.open_request
        self.duplicates += later.duplicates
        self.news += later.news
        self.returned += later.returned
        self.refused += later.refused
        self.receipts |= later.receipts
        if later.finished is None:
            return
        if self.finished is not None:
            raise LocalProtocolError(f"round {later.finished} ended before round {self.finished} was performed")
        self.finished, self.record, self.skipped = later.finished, later.record, later.skipped
        self.applied, self.given, self.settled_model = later.applied, later.given, later.settled_model
