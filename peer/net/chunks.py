"""Frames in pieces, under credit: how one direction of a connection is cut and put together again.

Pure: no socket, no clock. A frame of any size passes with little memory beside itself. The receiver grants credit; the
sender stops when it is spent. Every number of a chunk is checked before its data is kept.
"""

from __future__ import annotations

import io
from collections import deque

from peer.errors import RemoteProtocolError
from peer.net.envelope import Piece

CHUNK_COST = 64
"""Credit that a chunk costs beside its data, so that a flood of tiny ones is bounded too."""
CRUMB_BYTES = 16 * 1024
"""Least credit worth a chunk, unless the rest of the frame is smaller: below it, waiting is better than sending
crumbs."""
_MAX_CREDIT_BYTES = 1 << 50
_TRUSTED_SHARE = 8
"""A frame gets all of its memory once an eighth of it is there: less would be copied each time that it grows."""


class Cutter:
    """Cuts queued frames into the chunks of envelopes as credit allows."""

    def __init__(self, *, chunk_bytes: int, credit_bytes: int) -> None:
        self.credit_bytes = credit_bytes
        """Bytes that the receiver still accepts."""
        self._chunk_bytes = chunk_bytes
        self._crumb_bytes = min(CRUMB_BYTES, credit_bytes // 4)
        self._queue: deque[tuple[int, bytes]] = deque()
        self._offset = 0

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, seq: int, frame: bytes) -> None:
        """Queue a frame."""
        self._queue.append((seq, frame))

    def add_credit(self, granted_bytes: int) -> None:
        """Take credit that the receiver grants. Raises RemoteProtocolError if the sum is absurd."""
        self.credit_bytes += granted_bytes
        if self.credit_bytes > _MAX_CREDIT_BYTES:
            raise RemoteProtocolError(f"it granted credit of {self.credit_bytes} bytes")

    @property
    def ready(self) -> bool:
        """Whether there is something to send and credit to send it."""
        if not self._queue:
            return False
        rest = len(self._queue[0][1]) - self._offset
        return self.credit_bytes >= CHUNK_COST + min(rest, self._crumb_bytes)

    def cut(self) -> tuple[list[Piece], int, int]:
        """Return the chunks of the next envelope, how many frames they complete, and the bytes of those."""
        pieces: list[Piece] = []
        room = self._chunk_bytes
        frames = frame_bytes = 0
        while room and self.ready:
            seq, frame = self._queue[0]
            rest = len(frame) - self._offset
            take = min(rest, room, self.credit_bytes - CHUNK_COST)
            if take == len(frame):
                pieces.append(Piece(seq, 0, 0, frame))
            else:
                part = memoryview(frame)[self._offset : self._offset + take]
                pieces.append(Piece(seq, self._offset, len(frame), part))
            self.credit_bytes -= take + CHUNK_COST
            room -= take
            self._offset += take
            if self._offset == len(frame):
                self._queue.popleft()
                self._offset = 0
                frames += 1
                frame_bytes += len(frame)
        return pieces, frames, frame_bytes


class Assembler:
    """Puts chunks together to frames and keeps the receiver's side of the credit."""

    def __init__(self, *, window_bytes: int, chunk_bytes: int, max_frame_bytes: int, last_seq: int) -> None:
        """Expect frames from number `last_seq + 1` on; earlier ones may come again first."""
        self._window_bytes, self._chunk_bytes, self._max_frame_bytes = window_bytes, chunk_bytes, max_frame_bytes
        self._granted_bytes = window_bytes
        self._used_bytes = 0
        self._highest_first = last_seq + 1
        self._seq = 0
        """Number of the frame that is being put together; 0 for one outside the sequence."""
        self._last = 0
        """Number of the last frame of the sequence that was begun."""
        self._total = 0
        self._buffer: io.BytesIO | None = None

    def take(self, pieces: list[Piece]) -> list[tuple[int, bytes]]:
        """Return the frames that the chunks of an envelope complete, with their numbers, in order.

        Raises RemoteProtocolError if a number in a chunk is impossible or more was sent than was granted.
        """
        frames = []
        envelope_bytes = 0
        for piece in pieces:
            envelope_bytes += len(piece.data)
            if envelope_bytes > self._chunk_bytes:
                raise RemoteProtocolError(f"it sent more than {self._chunk_bytes} bytes of chunks in one envelope")
            cost = len(piece.data) + CHUNK_COST
            self._granted_bytes -= cost
            if self._granted_bytes < 0:
                raise RemoteProtocolError(f"it sent {-self._granted_bytes} bytes more than it had credit for")
            self._used_bytes += cost
            if (frame := self._add(piece.sequence, piece.offset, piece.frame_bytes, piece.data)) is not None:
                frames.append((piece.sequence, frame))
        return frames

    @property
    def owes(self) -> bool:
        """Whether credit should be given back now: once a quarter of the window has been used."""
        return self._used_bytes * 4 >= self._window_bytes

    def grant(self) -> int:
        """Return the credit to give back, all that was used."""
        granted, self._used_bytes = self._used_bytes, 0
        self._granted_bytes += granted
        return granted

    def _add(self, seq: int, offset: int, total: int, data: bytes | memoryview) -> bytes | None:
        if not data:
            raise RemoteProtocolError(f"it sent an empty chunk of frame {seq}")
        total = total or len(data)
        if total > self._max_frame_bytes:
            raise RemoteProtocolError(
                f"it announced a frame of {total} bytes; at most {self._max_frame_bytes} are possible in this run "
                "(transport.max_message_mbytes, and the size of the model)"
            )
        if self._buffer is None:
            self._begin(seq, offset, total)
            if len(data) == total:
                return bytes(data)
            # Grows as the data comes: an announced size alone allocates nothing.
            self._buffer = io.BytesIO()
        elif seq != self._seq or total != self._total or offset != self._buffer.tell():
            raise RemoteProtocolError(
                f"it sent bytes from {offset} of frame {seq} ({total} bytes), where bytes from {self._buffer.tell()} "
                f"of frame {self._seq} ({self._total} bytes) are next"
            )
        if offset + len(data) > total:
            raise RemoteProtocolError(f"it sent {offset + len(data)} bytes of frame {seq}, which has {total}")
        if offset * _TRUSTED_SHARE < total <= (offset + len(data)) * _TRUSTED_SHARE:
            # The operating system gives such zeros their memory when they are written to.
            begun, self._buffer = self._buffer, io.BytesIO(bytes(total))
            self._buffer.write(begun.getbuffer())
        self._buffer.write(data)
        if self._buffer.tell() < total:
            return None
        # Hands over the memory of the buffer instead of copying it.
        frame, self._buffer = self._buffer.getvalue(), None
        return frame

    def _begin(self, seq: int, offset: int, total: int) -> None:
        if seq:
            if self._last == 0 and seq > self._highest_first:
                raise RemoteProtocolError(f"it begins with frame {seq}, where {self._highest_first} is next")
            if self._last and seq != self._last + 1:
                raise RemoteProtocolError(f"it sent frame {seq} after frame {self._last}")
            self._last = seq
        if offset:
            raise RemoteProtocolError(f"it begins frame {seq} at byte {offset}")
        self._seq, self._total = seq, total
