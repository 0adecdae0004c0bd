"""When to tell a neighbour that its frames are durable here.

Pure: times are arguments, in seconds. A receipt of its own costs an envelope and a packet. A receipt therefore waits
for 8 frames, a quarter of the window, half a second without another frame, or anything else to send.
"""

from __future__ import annotations

_FRAMES = 8
_DELAY_S = 0.5


class Receipts:
    """The receipts of one connection."""

    def __init__(self, *, received: int, window_bytes: int) -> None:
        """The hello said that frames up to number `received` are durable."""
        self._window_bytes = window_bytes
        self._durable = self._sent = received
        self._received_bytes = 0
        """Since the last receipt."""
        self._send_at = 0.0

    def frame_received(self, frame_bytes: int) -> None:
        """Count a frame that came."""
        self._received_bytes += frame_bytes

    def acknowledge(self, upto: int, now: float) -> None:
        """Note that frames up to a number are durable."""
        if upto <= self._durable:
            return
        self._durable = upto
        urgent = upto - self._sent >= _FRAMES or 4 * self._received_bytes >= self._window_bytes
        self._send_at = now if urgent else now + _DELAY_S

    def wait_s(self, now: float) -> float | None:
        """Return how long the receipt can still wait; None if there is none to send."""
        return None if self._durable == self._sent else max(0.0, self._send_at - now)

    def take(self) -> int:
        """Return the number up to which a receipt is sent with the next envelope; 0 if there is nothing new."""
        if self._durable == self._sent:
            return 0
        self._sent, self._received_bytes = self._durable, 0
        return self._sent
