"""Whom a peer is connected to, and how it reaches them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RelayAddress:
    """A peer that relays."""

    name: str
    address: str
    """Where it is dialled, "host:port"."""


@dataclass(frozen=True)
class Neighbor:
    """A peer at the other end of an edge."""

    index: int
    name: str
    address: str | None
    """Where it can be dialled, "host:port"."""
    dial: bool
    """Whether this end dials it, rather than wait for its call."""
    relay: RelayAddress | None = None
    """Where this end dials it, if it has no address of its own."""
    calls: str | None = None
    """Where it is to dial this peer; None where it is not, or nobody knows."""

    @property
    def can_be_dialled(self) -> bool:
        """Whether this end knows where to dial it."""
        return self.address is not None or self.relay is not None

    @property
    def place(self) -> str:
        """Where it is dialled, for people."""
        return f"relay {self.relay.name}" if self.relay is not None else str(self.address)
