"""Exactly-once bookkeeping of one peer toward one neighbour, for both directions.

Pure: no clock, no socket, no disk. A frame is identified by (sender, sequence number), counted from 1 over the whole
run. The sender keeps it until the receiver says that it has it durably, and sends it again after every reconnection;
the receiver drops frames that it has seen. Mass is thus neither minted nor burnt, whatever the connection does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from peer.errors import LocalProtocolError, RemoteProtocolError


@dataclass(frozen=True, kw_only=True)
class OutLinkState:
    """The part of an `OutLink` that has to survive."""

    next_seq: int = 1
    frames: tuple[bytes, ...] = ()
    """The last ones of those numbers, in order."""


@dataclass(frozen=True, kw_only=True)
class InLinkState:
    """The part of an `InLink` that has to survive."""

    last_seq: int = 0


class OutLink:
    """The frames for one neighbour that it has not confirmed to have durably."""

    def __init__(self) -> None:
        self.next_seq = 1
        self.backlog_bytes = 0
        """Total size of the frames that are not acknowledged."""
        self._frames: deque[bytes] = deque()

    @property
    def acknowledged(self) -> int:
        """The neighbour durably has every frame up to this number."""
        return self.next_seq - 1 - len(self._frames)

    @property
    def backlog(self) -> int:
        """Number of frames that are not acknowledged."""
        return len(self._frames)

    def push(self, frame: bytes) -> int:
        """Return the sequence number of a new frame, which is kept until it is acknowledged."""
        seq = self.next_seq
        self._frames.append(frame)
        self.backlog_bytes += len(frame)
        self.next_seq += 1
        return seq

    def acknowledge(self, upto: int) -> list[int]:
        """Return the numbers of the frames that a receipt (cumulative) frees, and forget them.

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
        freed = list(range(first, upto + 1))
        for _ in freed:
            self.backlog_bytes -= len(self._frames.popleft())
        return freed

    def unacknowledged(self, after: int) -> list[tuple[int, bytes]]:
        """Return (number, frame) of the frames kept beyond number `after`, in order."""
        first = self.acknowledged + 1
        skip = max(0, after - first + 1)
        return [(first + skip + i, frame) for i, frame in enumerate(islice(self._frames, skip, None))]

    def state(self) -> OutLinkState:
        """Return the numbers and the frames that are kept."""
        return OutLinkState(next_seq=self.next_seq, frames=tuple(self._frames))

    def restore(self, state: OutLinkState) -> None:
        """Restore a result of `state`. Raises LocalProtocolError if it cannot be that."""
        if state.next_seq < 1 or len(state.frames) >= state.next_seq:
            raise LocalProtocolError(f"{len(state.frames)} frames cannot be kept before number {state.next_seq}")
        self.next_seq = state.next_seq
        self._frames = deque(state.frames)
        self.backlog_bytes = sum(map(len, state.frames))


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

    def state(self) -> InLinkState:
        """Return the number of the last frame accepted."""
        return InLinkState(last_seq=self.last_seq)

    def restore(self, state: InLinkState) -> None:
        """Restore a result of `state`: whatever was saved is durable. Raises LocalProtocolError if it cannot be."""
        if state.last_seq < 0:
            raise LocalProtocolError(f"{state.last_seq} is not the number of a frame")
        self.last_seq = self.durable_seq = state.last_seq
