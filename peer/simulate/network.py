"""The virtual network: arrival times of frames, and the order of events.

Time is virtual and in seconds; nothing here reads a clock. Each directed link sends one frame after the other at its
rate, then the frame travels for the latency, as a single flow over a shaped link does. If peers have one interface
each, all frames that a peer sends share its upload, and all that it receives its download: frames to several neighbours
leave side by side, as flows of TCP do.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Event = TypeVar("Event")


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A time in which no frame crosses between some peers and the others; senders keep frames and send them
    afterwards."""

    peers: frozenset[int]
    """One side."""
    from_s: float
    until_s: float

    def divides(self, one: int, other: int, now: float) -> bool:
        """Return whether nothing can cross between two peers now."""
        return self.from_s <= now < self.until_s and (one in self.peers) != (other in self.peers)


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """Properties of every link."""

    rate_kbit_s: float | None = None
    """Bandwidth of each directed link, in units of 1000 bit/s; None: unlimited."""
    latency_s: float = 0.0
    """One-way delay."""
    up_kbit_s: float | None = None
    """Bandwidth of each peer's interface for all that it sends; None: unlimited."""
    down_kbit_s: float | None = None
    """The same for all that it receives."""
    overhead_bytes: int = 90
    """Bytes that TLS, HTTP/2, TCP and IP add to a frame (measured on loopback for one message that fits a segment)."""

    segment_bytes: int = 1448
    segment_overhead_bytes: int = 0
    """Bytes that each further segment of TCP adds (66 with Ethernet, IPv4 and time stamps)."""
    cuts: tuple[Cut, ...] = ()
    """Times in which the cluster is divided."""

    def occupies_s(self, frame_bytes: int, rate_kbit_s: float | None) -> float:
        """Return the seconds for which a frame occupies a link or an interface of that rate."""
        if rate_kbit_s is None:
            return 0.0
        return self.wire_bytes(frame_bytes) * 8 / (rate_kbit_s * 1000)

    def wire_bytes(self, frame_bytes: int) -> int:
        """Return the bytes of a frame on the interface, headers included."""
        further_segments = frame_bytes // self.segment_bytes
        return frame_bytes + self.overhead_bytes + further_segments * self.segment_overhead_bytes


@dataclass
class VirtualNetwork:
    """Times until which links and interfaces are busy."""

    model: LinkModel
    _free_at: dict[tuple[int, int], float] = field(default_factory=dict)
    _upload_free_at: dict[int, float] = field(default_factory=dict)
    _download_free_at: dict[int, float] = field(default_factory=dict)

    def arrivals(self, sender: int, frames: Sequence[tuple[int, int]], now: float) -> list[float]:
        """Send frames, each (receiver, bytes), at the same instant; return when each arrives.

        Calls for one sender must come in the order of `now`.
        """
        model = self.model
        start = max(now, self._upload_free_at.get(sender, 0.0))
        needs = [model.occupies_s(frame_bytes, model.up_kbit_s) for _, frame_bytes in frames]
        self._upload_free_at[sender] = start + sum(needs)
        # Equal parts for all that are not through yet: a frame waits for no more of another than it has itself.
        ordered = sorted(needs)
        through = [0.0, *itertools.accumulate(ordered)]
        sent = []
        for need in needs:
            smaller = bisect.bisect_right(ordered, need)
            sent.append(start + through[smaller] + (len(needs) - smaller) * need)
        return [
            self._arrival(sender, receiver, frame_bytes, now, start, end)
            for (receiver, frame_bytes), end in zip(frames, sent, strict=True)
        ]

    def _arrival(self, sender: int, receiver: int, frame_bytes: int, now: float, start: float, sent: float) -> float:
        """Return the arrival of a frame of `now` that passes its sender's interface from `start` to `sent`."""
        model = self.model
        whole_at = max((cut.until_s for cut in model.cuts if cut.divides(sender, receiver, now)), default=0.0)
        start = max(start, whole_at, self._free_at.get((sender, receiver), 0.0))
        sent = max(sent, start + model.occupies_s(frame_bytes, model.rate_kbit_s))
        if sent > now:
            self._free_at[sender, receiver] = sent
        # The first bytes arrive while the last are still being sent, and others fill the gaps between them.
        start = max(start + model.latency_s, self._download_free_at.get(receiver, 0.0))
        drained = start + model.occupies_s(frame_bytes, model.down_kbit_s)
        if model.down_kbit_s is not None:
            self._download_free_at[receiver] = drained
        return max(sent + model.latency_s, drained)


class Agenda(Generic[Event]):
    """Events in the order of their time; those of the same instant in the order in which they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Event]] = []
        self._added = 0
        self._instant = -math.inf
        self._at_once: deque[Event] = deque()
        """Events added at `_instant` for `_instant`. If links take no time, these are all messages of a round, and the
        time of each in a heap would grow with their number."""

    def __bool__(self) -> bool:
        return bool(self._at_once or self._heap)

    def add(self, time_s: float, event: Event) -> None:
        """Put an event on the agenda."""
        if time_s == self._instant:
            self._at_once.append(event)
        else:
            heapq.heappush(self._heap, (time_s, self._added, event))
            self._added += 1

    def pop_stretch(self, length_s: float) -> list[tuple[float, Event]]:
        """Remove and return the next event and all that follow in less than `length_s`; those at the same instant in
        any case."""
        stretch = [self.pop()]
        start = stretch[0][0]
        while self and (self._next_s == start or self._next_s < start + length_s):
            stretch.append(self.pop())
        return stretch

    def pop(self) -> tuple[float, Event]:
        """Take the next event off the agenda; return its time and the event."""
        # At the same instant those of the heap first: they were added before time reached it.
        if self._at_once and not (self._heap and self._heap[0][0] <= self._instant):
            return self._instant, self._at_once.popleft()
        time_s, _, event = heapq.heappop(self._heap)
        if not self._at_once:
            self._instant = time_s
        return time_s, event

    @property
    def _next_s(self) -> float:
        """The time of the next event, which there is."""
        if not self._heap:
            return self._instant
        return min(self._heap[0][0], self._instant) if self._at_once else self._heap[0][0]
