"""The sending side of one connection: the queue for a neighbour, and its next envelope.

Pure: times are arguments, in seconds. Items that are ready at the same time share an envelope.
"""

from __future__ import annotations

from collections import deque

from peer.net.chunks import Cutter
from peer.net.counters import LinkCounters
from peer.net.envelope import encode
from peer.net.handler import MAX_BULLETIN_BYTES, MAX_TOPIC
from peer.net.inbox import Inbox
from peer.net.receipts import Receipts
from peer.proto.sottovoce.v1 import exchange_pb2 as pb

REVOKED_TOPIC = "revoked"
"""Topic of the note that holds a revocation list."""
_MAX_QUEUED_NOTES = 256


class Outbox:
    """Packs the envelopes of one connection."""

    def __init__(self, cutter: Cutter, receipts: Receipts, inbox: Inbox, counters: LinkCounters) -> None:
        """`inbox` says how much credit to grant; sent bytes are counted in `counters`."""
        self._cutter, self._receipts, self._inbox, self._counters = cutter, receipts, inbox, counters
        self._notes: deque[pb.Bulletin] = deque(maxlen=_MAX_QUEUED_NOTES)
        self._revocations = b""
        self._heartbeat = False

    def push_frame(self, seq: int, frame: bytes) -> None:
        """Queue a frame."""
        self._cutter.push(seq, frame)

    def push_note(self, topic: str, data: bytes) -> None:
        """Queue a note; where more than 256 wait, the oldest is dropped."""
        self._notes.append(pb.Bulletin(topic=topic, data=data))

    def push_revocations(self, pem: bytes) -> None:
        """Queue a revocation list in place of an older one. It never gives way to notes."""
        self._revocations = pem

    def push_heartbeat(self) -> None:
        """Have an envelope sent even if there is nothing to say."""
        self._heartbeat = True

    def next_envelope(self, now: float) -> bytes | None:
        """Return the next envelope; None if nothing is ready."""
        chunks, credit = self._cutter.ready, self._inbox.credit_is_due
        notes = bool(self._notes or self._revocations)
        if not (chunks or credit or notes or self._heartbeat or self._receipts.wait_s(now) == 0):
            return None
        self._heartbeat = False
        envelope = pb.Envelope(receipt=self._receipts.take(), bulletins=self._next_notes())
        if credit:
            envelope.credit = self._inbox.grant()
        if not chunks:
            return envelope.SerializeToString()
        pieces, frames, frame_bytes = self._cutter.cut()
        self._counters.frames_sent += frames
        self._counters.frame_bytes_sent += frame_bytes
        return encode(envelope, pieces)

    def _next_notes(self) -> list[pb.Bulletin]:
        notes: list[pb.Bulletin] = []
        room = MAX_BULLETIN_BYTES
        if self._revocations:
            notes.append(pb.Bulletin(topic=REVOKED_TOPIC, data=self._revocations))
            room -= len(self._revocations) + MAX_TOPIC
            self._revocations = b""
        while self._notes and (len(self._notes[0].data) <= room or not notes):
            room -= len(self._notes[0].data) + MAX_TOPIC
            notes.append(self._notes.popleft())
        return notes
