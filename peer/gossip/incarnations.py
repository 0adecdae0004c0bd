"""Numbers of peers that take part again after they were lost.

A device that was declared lost never comes back under its number: messages of it may still be on their way, and nobody
knows which of its state others rely on. It joins as an entirely new peer, under a number of its own. Everything that
keeps state for a number (streams, receipts, replicas, votes, losses, journals) sees two unrelated peers; only the maps
from numbers to names, addresses, certificates and data ask for the device of a number.

The first incarnation of a device has its index as its number, so that runs in which nobody comes back have the numbers
that they always had. Each further one has the number of the one before it, plus the stride: as many as there can be
devices.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_NEWCOMERS = 1024
"""Most devices that may join beyond those that everybody lists."""
MAX_INCARNATIONS = 64
"""Most incarnations of a device: each number below the highest costs a row of every matrix."""


@dataclass(frozen=True)
class Numbering:
    """Map between peer numbers and device indices of one run; the same on all devices."""

    num_listed: int
    """Devices that everybody lists."""

    @property
    def stride(self) -> int:
        """Difference between the numbers of successive incarnations."""
        return self.num_listed + MAX_NEWCOMERS

    def number(self, device: int, incarnation: int) -> int:
        """Return the number of a device, the first incarnation being 0."""
        return device + incarnation * self.stride

    def device(self, number: int) -> int:
        """Return the index of the device with a number."""
        return number % self.stride

    def incarnation(self, number: int) -> int:
        """Return which incarnation of its device a number stands for."""
        return number // self.stride

    def former(self, number: int) -> int | None:
        """Return the number of the incarnation before; None for the first."""
        return number - self.stride if number >= self.stride else None

    def is_possible(self, number: int) -> bool:
        """Return whether some device may have a number."""
        return 0 <= number < self.stride * MAX_INCARNATIONS
