"""Progress of the run for people: in the log every few seconds, and in `systemctl status` all the time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from peer.daemon.device.service_manager import notify
from peer.terminal import TELL_EVERY_S, duration

log = logging.getLogger("sotto")

_LOOK_EVERY_S = 2.0
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
        self._waits_since: float | None = None
        """When the round under way was first seen to wait for others; None while it does not."""
        self._line_at: float | None = None

    async def watch(self, now: Callable[[], float]) -> None:
        """Tell of the progress, without end."""
        while True:
            self.look(now())
            await asyncio.sleep(_LOOK_EVERY_S)

    def look(self, now: float) -> None:
        """Tell the service manager how far this peer is, and the log if it is time for a line."""
        sentence = self.sentence(now)
        notify(f"STATUS={sentence}")
        if self._line_at is None or now >= self._line_at:
            if self._line_at is not None:
                log.info("%s", sentence)
            self._line_at = now + TELL_EVERY_S

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
        if number := status["neighbors"]:
            parts.append(f"{status['neighbors_up']} of {number} neighbour{'s' * (number > 1)} connected")
        waiting = status.get("waiting_for")
        self._waits_since = None if not waiting else now if self._waits_since is None else self._waits_since
        if waiting and self._waited(now) >= _NOTABLE_WAIT_S:
            names = ", ".join(waiting[:3]) + (f" and {len(waiting) - 3} more" if len(waiting) > 3 else "")
            parts.append(f"waiting for {names}, {duration(self._waited(now))} so far")
        elif round_s is not None and done < rounds:
            parts.append(f"{duration(round_s)} a round, about {duration(round_s * (rounds - done))} left")
        state = str(status["state"])
        return ", ".join(parts if state == "running" else [state, *parts])

    def _seconds_per_round(self, now: float, done: int) -> float | None:
        """Return how long a round has taken of late; None before there are two looks at different rounds."""
        seen = self._seen
        if not seen or seen[-1][1] != done:
            if seen and (done < seen[-1][1] or (len(seen) == 1 and self._waited(now) >= _NOTABLE_WAIT_S)):
                # The first round of a process also waits until the others are there.
                seen.clear()
            self._waits_since = None
            seen.append((now, done))
        while len(seen) > 2 and seen[1][0] <= now - _WINDOW_S:
            seen.popleft()
        (began, first), (at, last) = seen[0], seen[-1]
        # The round under way counts once it takes longer than the others did.
        return max((at - began) / (last - first), (now - began) / (last - first + 1)) if last > first else None

    def _waited(self, now: float) -> float:
        """Return for how long the round under way has waited for others, in seconds."""
        return 0.0 if self._waits_since is None else now - self._waits_since
