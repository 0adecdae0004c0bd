"""Progress of the run for people: in the log now and then, and in `systemctl status` all the time."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from peer.daemon.device.service_manager import notify

log = logging.getLogger("sotto")

_LOOK_EVERY_S = 2.0
_LINE_S, _LONGEST_PAUSE_S = 10.0, 600.0
"""Lines of the log: the first after so many seconds, then after pauses that double up to the longest. Where a person
watches they do not double."""
_WINDOW_S = 300.0
"""Span over which the speed is measured: the links may be better or worse than yesterday."""
_NOTABLE_WAIT_S = 5.0


class ProgressLog:
    """Watches one peer. The time is an argument, in seconds on any clock."""

    def __init__(self, status: Callable[[], Mapping[str, Any]], is_member: Callable[[], bool]) -> None:
        """`status` returns the fields of `sotto status`, `is_member` whether this peer takes part."""
        self._status, self._is_member = status, is_member
        self._seen: deque[tuple[float, int]] = deque()
        """(time, completed rounds), newest last; the first is the newest that is older than the window."""
        self._round_at: float | None = None
        """When a round was last seen to be completed, or the watch began."""
        self._line_at: float | None = None
        self._pause_s = _LINE_S

    async def watch(self, now: Callable[[], float]) -> None:
        """Tell of the progress, without end."""
        while True:
            self.look(now())
            await asyncio.sleep(_LOOK_EVERY_S)

    def look(self, now: float) -> None:
        """Tell the service manager how far this peer is, and the log if it is time for a line."""
        sentence = self.sentence(now)
        notify(f"STATUS={sentence}")
        if self._line_at is None:
            self._line_at = now + self._pause_s
        elif now >= self._line_at:
            self._pause_s = self._pause_s if sys.stderr.isatty() else min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._line_at = now + self._pause_s
            log.info("%s", sentence)

    def sentence(self, now: float) -> str:
        """Return how far this peer is."""
        status = self._status()
        done, rounds = int(status["round"]), int(status["rounds"])
        round_s = self._seconds_per_round(now, done)
        if not self._is_member():
            # A newcomer: the rounds that it is given when it becomes a member were trained by others.
            self._seen.clear()
            round_s = None
        parts = [f"round {done} of {rounds}"]
        if (loss := status.get("loss")) is not None:
            parts.append(f"loss {loss:.3g}")
        if (accuracy := status.get("accuracy")) is not None:
            parts.append(f"accuracy {100 * accuracy:.1f} %")
        if status["neighbors"]:
            parts.append(f"{status['neighbors_up']} of {status['neighbors']} neighbours connected")
        waited = now - (now if self._round_at is None else self._round_at)
        if (waiting := status.get("waiting_for")) and waited >= _NOTABLE_WAIT_S:
            names = ", ".join(waiting[:3]) + (f" and {len(waiting) - 3} more" if len(waiting) > 3 else "")
            parts.append(f"waiting for {names} since {duration(waited)}")
        elif round_s is not None and done < rounds:
            parts.append(f"{duration(round_s)} a round, about {duration(round_s * (rounds - done))} left")
        state = str(status["state"])
        return ", ".join(parts if state == "running" else [state, *parts])

    def _seconds_per_round(self, now: float, done: int) -> float | None:
        """Return how long a round has taken of late; None before there are two looks at different rounds."""
        seen = self._seen
        if not seen or seen[-1][1] != done:
            if seen and done < seen[-1][1]:
                seen.clear()
            self._round_at = now
            seen.append((now, done))
        while len(seen) > 2 and seen[1][0] <= now - _WINDOW_S:
            seen.popleft()
        (began, first), (_, last) = seen[0], seen[-1]
        return (now - began) / (last - first) if last > first else None


def duration(seconds: float) -> str:
    """Return a duration as "35 ms", "8.3 s", "4 min 12 s" or "3 h 05 min"."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    return f"{minutes} min {int(seconds) % 60:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
