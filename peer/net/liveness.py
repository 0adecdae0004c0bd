"""Whether a neighbour lives, and when to tell it that we do.

Pure: times are arguments, in seconds. An idle link carries an empty envelope every `heartbeat_s`; after three silent
intervals it is closed.

A chunk over a thin link may take longer than that. Until its last byte is here gRPC delivers nothing, but the kernel
(or the tunnel through a relay) sees bytes come: they are a sign of life too. That alone would let a neighbour hold a
connection open with one byte a second, so an envelope must also be complete after a generous time.
"""

from __future__ import annotations

_SILENT_INTERVALS = 3
_LEAST_BYTES_PER_S = 4096
"""The slowest pace of an envelope, beside the silence that is allowed."""


class Liveness:
    """The signs of life of one connection, both ways."""

    def __init__(self, *, heartbeat_s: float, their_heartbeat_s: float, chunk_bytes: int, now: float) -> None:
        """`chunk_bytes` is the largest envelope that may be on its way here."""
        self.silence_s = _SILENT_INTERVALS * max(heartbeat_s, their_heartbeat_s)
        self._patience_s = self.silence_s + chunk_bytes / _LEAST_BYTES_PER_S
        self.tick_s = min(1.0, heartbeat_s / 4)
        """Interval between checks."""
        self._heartbeat_s = heartbeat_s
        self._sent_at = self._heard_at = self._whole_at = now
        self._socket_bytes: int | None = None

    def sent(self, now: float) -> None:
        """Note that an envelope of ours left."""
        self._sent_at = now

    def received(self, now: float) -> None:
        """Note that a whole envelope came."""
        self._heard_at = self._whole_at = now

    def socket_received(self, total_bytes: int | None, now: float) -> None:
        """Note how many bytes the socket received so far; None if that is not known."""
        if total_bytes is not None and self._socket_bytes is not None and total_bytes > self._socket_bytes:
            self._heard_at = now
        self._socket_bytes = total_bytes

    def needs_heartbeat(self, now: float) -> bool:
        """Return whether we were silent for too long."""
        return now - self._sent_at >= self._heartbeat_s

    def verdict(self, now: float) -> str | None:
        """Return why the neighbour counts as gone; None while it lives."""
        if now - self._heard_at > self.silence_s:
            return f"nothing was heard for {self.silence_s:g} s"
        if now - self._whole_at > self._patience_s:
            return f"one message took longer than {self._patience_s:.0f} s"
        return None
