"""The receiving side of one connection: bytes from a neighbour become typed values here, and nowhere else.

Pure: times are arguments, in seconds. Everything that is wrong with an envelope raises RemoteProtocolError, because its
sender is to blame. Nothing of such an envelope is delivered.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from peer.errors import RemoteProtocolError
from peer.net.chunks import CRUMB_BYTES, Assembler
from peer.net.envelope import Piece, decode
from peer.net.handler import MAX_BULLETIN_BYTES, MAX_TOPIC
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from peer.rate_limits import Allowance

_SMALL_MESSAGES = {"rate": 500.0, "burst": 1000.0}
"""Units that one neighbour may spend, a second and at once. An envelope that bears no frame costs one, and so does a
chunk of a frame outside the sequence or of one that came before; the other units are below."""
_UNITS_PER_KBYTE = 1.0
"""Units for all data in an envelope other than chunk data."""
_UNITS_PER_NOTE = 1 / 8
_UNITS_PER_CRUMB = 1 / 8
"""Units for each chunk beyond the two that an honest neighbour may begin or end a frame with in one envelope."""


@dataclass(frozen=True, kw_only=True)
class LinkLimits:
    """The limits that this peer sets on each connection."""

    window_bytes: int
    """Credit: bytes that may be on their way to this peer, not taken yet."""
    chunk_bytes: int
    """Sum of chunk data in an envelope."""
    max_frame_bytes: int


class Received(NamedTuple):
    """The contents of one envelope."""

    frames: list[tuple[int, bytes]]
    """Completed frames with their numbers, in order."""
    receipt: int
    """Our frames are durable there up to this number; 0 where it says nothing of them."""
    credit: int
    """Bytes that may be sent in addition."""
    notes: list[tuple[str, bytes]]
    """Topics and contents."""
    close: pb.Close | None
    """The neighbour's last words on the stream."""


class Inbox:
    """Opens the envelopes of one connection and keeps account of the credit for them."""

    def __init__(
        self, limits: LinkLimits, *, received: int, pace: Allowance, their_chunk_bytes: int | None = None
    ) -> None:
        """Frames up to number `received` are durable here; the neighbour may repeat later ones. `pace` is that of the
        neighbour over all its connections; `their_chunk_bytes` bounds its envelopes, too."""
        self._window_bytes = limits.window_bytes
        self._assembler = Assembler(
            window_bytes=limits.window_bytes,
            chunk_bytes=limits.chunk_bytes,
            max_frame_bytes=limits.max_frame_bytes,
            last_seq=received,
        )
        self._received, self._pace = received, pace
        self._full_bytes = min(CRUMB_BYTES, limits.chunk_bytes, their_chunk_bytes or limits.chunk_bytes)
        """Chunk data of an envelope that may leave its last frame incomplete: `Cutter` sends no less."""
        self._held: deque[tuple[int, int]] = deque()
        """Numbers and sizes of frames that wait to be taken."""
        self._held_bytes = 0

    def open(self, data: bytes, *, now: float) -> Received:
        """Return the contents of an envelope. Raises RemoteProtocolError if it breaks the protocol."""
        envelope, pieces = decode(data)
        self._check_pace(envelope, pieces, len(data), now)
        if envelope.HasField("hello"):
            raise RemoteProtocolError("it sent a second hello")
        for note in envelope.bulletins:
            if len(note.data) > MAX_BULLETIN_BYTES or len(note.topic) > MAX_TOPIC:
                raise RemoteProtocolError(f"it sent a note of {len(note.data)} bytes")
        return Received(
            self._assembler.take(pieces),
            envelope.receipt,
            envelope.credit,
            [(note.topic, note.data) for note in envelope.bulletins],
            envelope.close if envelope.HasField("close") else None,
        )

    def hold(self, seq: int, size: int) -> None:
        """Withhold credit until a frame is taken."""
        self._held.append((seq, size))
        self._held_bytes += size

    def taken(self, upto: int) -> None:
        """Release the credit of held frames up to a number; 0 stands for the oldest one outside the sequence."""
        while self._held and self._held[0][0] <= upto:
            self._held_bytes -= self._held.popleft()[1]
            if not upto:
                break  # Frames outside the sequence have no numbers to be taken up to: one at a time.

    @property
    def credit_is_due(self) -> bool:
        """Whether credit should be granted now: not while a whole window of frames waits to be taken."""
        return self._held_bytes < self._window_bytes and self._assembler.owes

    def grant(self) -> int:
        """Return the credit to grant: all that was used since the last time."""
        return self._assembler.grant()

    def _check_pace(self, envelope: pb.Envelope, pieces: list[Piece], envelope_bytes: int, now: float) -> None:
        """Raise RemoteProtocolError if input that is free for its sender comes faster than honest peers send it."""
        data_bytes = fresh = incomplete = 0
        for piece in pieces:
            data_bytes += len(piece.data)
            if piece.sequence > self._received:
                fresh += 1
                incomplete += piece.offset + len(piece.data) != (piece.frame_bytes or len(piece.data))
        bears_frames = fresh > incomplete or (fresh and data_bytes >= self._full_bytes)
        units = (
            max(len(pieces) - fresh, 0 if bears_frames else 1)
            + _UNITS_PER_CRUMB * max(0, incomplete - 2)
            + _UNITS_PER_NOTE * len(envelope.bulletins)
            + _UNITS_PER_KBYTE * (envelope_bytes - data_bytes) / 1024
        )
        if not self._pace.spend(units, now):
            raise RemoteProtocolError(
                f"it floods this peer: more than {self._pace.rate:g} messages or kB a second beside frames"
            )


def new_pace(now: float) -> Allowance:
    """Return one neighbour's allowance for everything but frames."""
    return Allowance(**_SMALL_MESSAGES, now=now)
