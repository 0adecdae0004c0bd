"""Neighbours and the routes to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RelayAddress:
    """A peer that relays."""

    name: str
    address: str
    """Address to dial, "host:port"."""


@dataclass(frozen=True)
class Neighbor:
    """A peer at the other end of an edge."""

    index: int
    name: str
    address: str | None
    """Address to dial, "host:port"."""
    dial: bool
    """Whether this end dials it, rather than wait for its call."""
    relay: RelayAddress | None = None
    """Relay through which to dial it, if it has no address of its own."""
    calls: str | None = None
    """Address at which it is to dial this peer; None if it is not to, or if that is unknown."""

    @property
    def can_be_dialled(self) -> bool:
        """Whether this end knows where to dial it."""
        return self.address is not None or self.relay is not None

    @property
    def place(self) -> str:
        """The address to dial, for people."""
        return f"relay {self.relay.name}" if self.relay is not None else str(self.address)
