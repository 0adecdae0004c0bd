"""Remaining time of a run, estimated from its last minute."""

from __future__ import annotations

from collections import deque

_WINDOW_S = 60.0
_LEAST_S = 3.0
"""Least observed seconds for an estimate."""


class Pace:
    """Rounds by time."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def left_s(self, at: float, done: int | None, rounds: int | None) -> float | None:
        """Return the seconds left, `done` of `rounds` rounds being complete now; None where there is no estimate."""
        if done is None or rounds is None:
            return None
        if self._seen and done < self._seen[-1][1]:
            self._seen.clear()  # The run went back to a checkpoint.
        self._seen.append((at, done))
        while self._seen[0][0] < at - _WINDOW_S:
            self._seen.popleft()
        (first_at, first), span = self._seen[0], at - self._seen[0][0]
        if done >= rounds:
            return 0.0
        if span < _LEAST_S or done == first:
            return None
        return (rounds - done) * (at - first_at) / (done - first)
