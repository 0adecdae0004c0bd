"""The virtual network: when a frame that leaves now arrives, and in which order things happen.

Time is virtual and in seconds; nothing here reads a clock. Each directed link sends one frame after the other at its
rate, then the frame travels for the latency: what a single flow over a shaped link does.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Event = TypeVar("Event")


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """What every link is like."""

    rate_kbit_s: float | None = None
    """Bandwidth of each directed link, in units of 1000 bit/s; None: unlimited."""
    latency_s: float = 0.0
    """One-way delay."""
    overhead_bytes: int = 90
    """What TLS, HTTP/2, TCP and IP add to a frame (measured on loopback for one message that fits a segment)."""

    def serialization_s(self, frame_bytes: int) -> float:
        """Return how long a frame occupies the link."""
        if self.rate_kbit_s is None:
            return 0.0
        return (frame_bytes + self.overhead_bytes) * 8 / (self.rate_kbit_s * 1000)


@dataclass
class VirtualNetwork:
    """Which link is busy until when."""

    model: LinkModel
    _free_at: dict[tuple[int, int], float] = field(default_factory=dict)

    def arrival(self, sender: int, receiver: int, frame_bytes: int, now: float) -> float:
        """Send a frame and return when it arrives. Calls for one link must come in the order of `now`."""
        start = max(now, self._free_at.get((sender, receiver), 0.0))
        done = start + self.model.serialization_s(frame_bytes)
        self._free_at[sender, receiver] = done
        return done + self.model.latency_s


class Agenda(Generic[Event]):
    """Events in the order of their time; those of the same instant in the order in which they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Event]] = []
        self._added = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, time_s: float, event: Event) -> None:
        """Put an event on the agenda."""
        heapq.heappush(self._heap, (time_s, self._added, event))
        self._added += 1

    def pop(self) -> tuple[float, Event]:
        """Take the next event off the agenda; return its time and the event."""
        time_s, _, event = heapq.heappop(self._heap)
        return time_s, event
