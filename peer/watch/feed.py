"""Repeated looks at a run, and their findings for all pages.

There is one poller, however many pages are open. A page gets the parts that changed since it took some last; a slow one
skips versions, and keeps nobody waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from time import monotonic

from peer.watch.events import Event, changes
from peer.watch.observer import Observer
from peer.watch.snapshot import Snapshot
from peer.watch.view import Parts, View

logger = logging.getLogger(__name__)

MOST_EVENTS = 200
_EVERY_S = 1.0
_PEERS_A_SECOND = 20
"""Peers asked per second; of more, each is asked less often."""
_AFTER_FAILURE_S = 5.0


class Feed:
    """The newest parts, and the pages that wait for newer ones."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._view, self._pace = View(observer.figures), Pace()
        self._parts: Parts = {}
        self._snapshot: Snapshot | None = None
        self._news = asyncio.Condition()
        self._is_closed = False

    async def poll(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            began = monotonic()
            try:
                await self.look()
            except Exception:  # The page stays, whatever a peer answers or the disk holds.
                logger.exception("this look found nothing")
                await asyncio.sleep(_AFTER_FAILURE_S)
            pause = max(_EVERY_S, len(self.observer.members) / _PEERS_A_SECOND)
            # A look that takes long is followed by a pause as long: training comes first.
            await asyncio.sleep(max(pause - (monotonic() - began), min(monotonic() - began, pause)))

    async def look(self) -> None:
        """Look once, and wake the pages that wait for news."""
        snapshot = await self.observer.look()
        self.events.extend(changes(self._snapshot, snapshot))
        self._snapshot = snapshot
        left_s = self._pace.left_s(snapshot.at, snapshot.round, snapshot.rounds)
        log = list(self.observer.logs.lines)
        # Drawing the charts of many peers takes a while, and pages are served meanwhile.
        self._parts = await asyncio.to_thread(
            self._view.parts, snapshot, left_s=left_s, events=list(self.events), log=log
        )
        await self._wake()

    def note(self, text: str) -> None:
        """Add an event that no look finds: an action of the operator."""
        self.events.append(Event(self._snapshot.at if self._snapshot is not None else 0.0, text))

    async def close(self) -> None:
        """End the waiting of all pages."""
        self._is_closed = True
        await self._wake()

    async def changes(self) -> AsyncIterator[list[tuple[str, str]]]:
        """Yield (name, JSON) of all parts, then of those that changed, as often as the caller asks."""
        sent: dict[str, str] = {}
        while True:
            async with self._news:
                await self._news.wait_for(lambda: self._is_closed or self._parts.items() - sent.items())
            if self._is_closed:
                return
            new = [(name, part) for name, part in self._parts.items() if sent.get(name) != part]
            sent.update(new)
            yield new

    async def _wake(self) -> None:
        async with self._news:
            self._news.notify_all()


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
