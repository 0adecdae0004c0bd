"""How long to wait for each neighbour before it counts as late, from how late it was so far.

A neighbour's lateness in a round is how long after our own message its own came, 0 where it came before. Links and
devices differ: one limit for all is too long for most of them and too short for some. The deadline of a neighbour is
`median + 6 × 1.4826 × MAD` of its last 32 latenesses and a little more (MAD is the median absolute deviation; times
1.4826 it estimates σ, of which six are rare even with heavy tails), never more than the limit of the configuration.

Messages that came after their round had gone on count as well, with how late they were: so the deadline of a link that
became slower grows until it is met again, or the limit is reached.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

WINDOW = 32
ENOUGH = 8
"""Before so many rounds were heard the limit holds: a median of fewer says little."""
SLACK_S = 0.05
"""What a scheduler or a garbage collector takes is no lateness."""


class Deadlines:
    """What is known of the lateness of each in-neighbour. The time is always an argument or a difference."""

    def __init__(self, *, limit_s: float, adaptive: bool) -> None:
        """`limit_s` is the deadline of a neighbour of which little is known, and the most for any."""
        self.limit_s, self.adaptive = limit_s, adaptive
        self._lateness: dict[int, deque[float]] = {}
        self._after_s: dict[int, float] = {}

    def heard(self, neighbor: int, lateness_s: float) -> None:
        """Take note of a round's message that came so long after our own."""
        window = self._lateness.setdefault(neighbor, deque(maxlen=WINDOW))
        window.append(max(0.0, lateness_s))
        self._after_s.pop(neighbor, None)

    def after_s(self, neighbor: int) -> float:
        """Return how long after our own message this neighbour counts as late."""
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
        """Take back what `state` returned."""
        self._after_s.clear()
        self._lateness = {neighbor: deque(window, maxlen=WINDOW) for neighbor, window in lateness.items()}

    def lateness_s(self, neighbor: int) -> float | None:
        """Return the median of what was heard of a neighbour; None before its first message."""
        window = self._lateness.get(neighbor)
        return statistics.median(window) if window else None
