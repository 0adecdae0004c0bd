"""Exactly-once bookkeeping of one peer toward one neighbour, for both directions.

Pure: no clock, no socket, no disk. A frame is identified by (sender, sequence number), counted from 1 over the whole
run. The sender keeps it until the receiver says that it has it durably, and sends it again after every reconnection;
the receiver drops frames that it has seen. Mass is thus neither minted nor burnt, whatever the connection does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from peer.errors import LocalProtocolError, RemoteProtocolError


class OutLink:
    """The frames for one neighbour that it has not confirmed to have durably."""

    def __init__(self) -> None:
        self.next_seq = 1
        self.backlog_bytes = 0
        """Total size of the frames that are not acknowledged."""
        self.frames: deque[bytes] = deque()
        """Those frames: the last ones of the numbers below `next_seq`, in order."""

    @property
    def acknowledged(self) -> int:
        """The neighbour durably has every frame up to this number."""
        return self.next_seq - 1 - len(self.frames)

    @property
    def backlog(self) -> int:
        """Number of frames that are not acknowledged."""
        return len(self.frames)

    def push(self, frame: bytes) -> int:
        """Return the sequence number of a new frame, which is kept until it is acknowledged."""
        seq = self.next_seq
        self.frames.append(frame)
        self.backlog_bytes += len(frame)
        self.next_seq += 1
        return seq

    def acknowledge(self, upto: int) -> None:
        """Forget the frames that a receipt (cumulative) frees.

        Raises RemoteProtocolError if the receipt is for a frame that was never sent, or takes an earlier one back.
        """
        if upto >= self.next_seq:
            raise RemoteProtocolError(
                f"it acknowledges frame {upto}, but we have sent {self.next_seq - 1}: the state of one of us is older "
                "than what the other remembers; start both from checkpoints of the same run"
            )
        first = self.acknowledged + 1
        if upto < first - 1:
            raise RemoteProtocolError(
                f"it has our frames up to {upto}, but had acknowledged {first - 1} before: it lost its state, "
                "and those frames are gone; restore its state folder or start the run anew"
            )
        for _ in range(first, upto + 1):
            self.backlog_bytes -= len(self.frames.popleft())

    def unacknowledged(self, after: int) -> list[tuple[int, bytes]]:
        """Return (number, frame) of the frames kept beyond number `after`, in order."""
        first = self.acknowledged + 1
        skip = max(0, after - first + 1)
        return [(first + skip + i, frame) for i, frame in enumerate(islice(self.frames, skip, None))]

    def restore(self, next_seq: int, frames: Sequence[bytes]) -> None:
        """Go on with these frames. Raises LocalProtocolError if that cannot be."""
        if next_seq < 1 or len(frames) >= next_seq:
            raise LocalProtocolError(f"{len(frames)} frames cannot be kept before number {next_seq}")
        self.next_seq = next_seq
        self.frames = deque(frames)
        self.backlog_bytes = sum(map(len, frames))


class InLink:
    """The numbers of the frames that one neighbour sent us."""

    def __init__(self) -> None:
        self.last_seq = 0
        """Every frame up to this number has been accepted."""
        self.durable_seq = 0
        """Every frame up to this number would survive a crash; receipts may confirm these."""
        self.duplicates = 0

    def accept(self, seq: int) -> bool:
        """Return whether frame `seq` is new; a duplicate is counted and to be dropped.

        Raises RemoteProtocolError if frames before it are missing.
        """
        if seq < 1 or seq > self.last_seq + 1:
            raise RemoteProtocolError(f"it sent frame {seq} where {self.last_seq + 1} is next")
        if seq <= self.last_seq:
            self.duplicates += 1
            return False
        self.last_seq = seq
        return True

    def mark_durable(self, upto: int) -> None:
        """Record that every frame up to `upto` would survive a crash. Raises LocalProtocolError if that cannot be."""
        if not self.durable_seq <= upto <= self.last_seq:
            raise LocalProtocolError(f"frame {upto} cannot become durable: {self.durable_seq} is, {self.last_seq} came")
        self.durable_seq = upto

    def restore(self, last_seq: int) -> None:
        """Go on after this number: whatever was saved is durable. Raises LocalProtocolError if that cannot be."""
        if last_seq < 0:
            raise LocalProtocolError(f"{last_seq} is not the number of a frame")
        self.last_seq = self.durable_seq = last_seq
