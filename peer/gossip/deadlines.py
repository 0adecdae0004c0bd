"""Deadlines of neighbours: the wait before each counts as late, from its past lateness.

The lateness of a neighbour in a round is the time from our own message to its message, 0 if its message came first.
Links and devices differ: one limit for all is too long for most of them and too short for some. The deadline of a
neighbour is `median + 6 × 1.4826 × MAD` of its last 32 latenesses plus a small slack, and never more than the limit of
the configuration. (MAD is the median absolute deviation; times 1.4826 it estimates σ, and six of these are rare even
with heavy tails.)

Messages that came after their round had gone on count with their lateness, too. The deadline of a link that became
slower thus grows until it is met again or reaches the limit.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

WINDOW = 32
ENOUGH = 8
"""Rounds to be heard before a deadline replaces the limit: a median of fewer says little."""
SLACK_S = 0.05
"""A pause of the scheduler or the garbage collector is no lateness."""


class Deadlines:
    """Past lateness of each in-neighbour. The time is always an argument or a difference."""

    def __init__(self, *, limit_s: float, adaptive: bool) -> None:
        """`limit_s`: the longest deadline, and that of a neighbour whose lateness is not known well."""
        self.limit_s, self.adaptive = limit_s, adaptive
        self._lateness: dict[int, deque[float]] = {}
        self._after_s: dict[int, float] = {}

    def heard(self, neighbor: int, lateness_s: float) -> None:
        """Record that a round's message came `lateness_s` after our own."""
        window = self._lateness.setdefault(neighbor, deque(maxlen=WINDOW))
        window.append(max(0.0, lateness_s))
        self._after_s.pop(neighbor, None)

    def after_s(self, neighbor: int) -> float:
        """Return the seconds after our own message at which this neighbour counts as late."""
        window = self._lateness.get(neighbor, ())
        if not self.adaptive or len(window) < ENOUGH:
            return self.limit_s
        if neighbor not in self._after_s:
            median = statistics.median(window)
            deviation = statistics.median(abs(each - median) for each in window)
            self._after_s[neighbor] = min(self.limit_s, median + 6 * 1.4826 * deviation + SLACK_S)
        return self._after_s[neighbor]

    def state(self) -> dict[int, list[float]]:
        """Return the latenesses heard of each neighbour: a round that is repeated has to decide alike."""
        return {neighbor: list(window) for neighbor, window in self._lateness.items()}

    def restore(self, lateness: Mapping[int, Sequence[float]]) -> None:
        """Restore a result of `state`."""
        self._after_s.clear()
        self._lateness = {neighbor: deque(window, maxlen=WINDOW) for neighbor, window in lateness.items()}

    def lateness_s(self, neighbor: int) -> float | None:
        """Return the median lateness of a neighbour; None before its first message."""
        window = self._lateness.get(neighbor)
        return statistics.median(window) if window else None
