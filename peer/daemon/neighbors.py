"""The neighbours as the daemon sees them: who they are now, who is connected, who left, and who refuses this peer.

Below it is the transport, which carries bytes; above it are the loops, which know the meaning of the bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

from peer.daemon.traffic import Traffic
from peer.errors import HandshakeRefused, LocalProtocolError
from peer.foreign_text import printable
from peer.net.counters import LinkCounters
from peer.net.transport import Transport
from peer.state.metrics import LinkRecord

_REFUSED_S = 15.0
"""Give up after this long when all that a peer waits for refuse it and never let it in."""
_DISMISSALS = 3
"""Dismissals in a row, over more than _REFUSED_S, that show that a neighbour does not want this peer."""


class Neighbors:
    """The links of one peer. The time is an argument, in seconds on the clock of the run."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.senders: tuple[int, ...] = ()
        """Peers that this one hears, ascending."""
        self.receivers: tuple[int, ...] = ()
        """Peers that hear this one, ascending."""
        self.all: tuple[int, ...] = ()
        self.left: dict[int, str] = {}
        """Neighbours that said goodbye, with their reason; until they are back."""
        self.met: set[int] = set()
        """Neighbours to which there was a link since this process began."""
        self._transport: Transport | None = None
        self.last_heard_at = 0.0
        """When anything came from any neighbour, frame or note."""
        self._heard_at: dict[int, float] = {}
        self._awaited_since: dict[int, float] = {}
        """Awaited peer that is no neighbour → since when."""
        self._refused_since: float | None = None
        self._silent_since_up: set[int] = set()
        """Neighbours of which no frame has come since they were connected."""
        self._dismissals: dict[int, tuple[int, float]] = {}
        """Neighbour → (connections in a row that ended before a frame of it came, when the first one did)."""

    # -- whom there is a link to ---------------------------------------------------------------------------------------

    def set_partners(self, senders: Iterable[int], receivers: Iterable[int]) -> None:
        """Take note of who the neighbours are from now on."""
        self.senders, self.receivers = tuple(sorted(senders)), tuple(sorted(receivers))
        self.all = tuple(sorted({*self.senders, *self.receivers}))

    def connect(self, transport: Transport) -> None:
        """Use this transport from now on. It calls back into the parts that use this one, so that it comes last."""
        self._transport = transport

    def let_go_in_fork(self) -> None:
        """See `Transport.let_go_in_fork`."""
        if self._transport is not None:
            self._transport.let_go_in_fork()

    @property
    def transport(self) -> Transport:
        """The transport below."""
        if self._transport is None:
            raise LocalProtocolError("the links have no transport yet")
        return self._transport

    def is_up(self, peer: int) -> bool:
        """Return whether there is a connection to a neighbour now."""
        return self.transport.is_up(peer)

    def is_reachable(self, peer: int) -> bool:
        """Return whether a neighbour is connected and stays."""
        return peer not in self.left and self.is_up(peer)

    def reachable(self) -> frozenset[int]:
        """Return the neighbours that are connected and stay."""
        return frozenset(filter(self.is_reachable, self.all))

    @property
    def all_have_left(self) -> bool:
        """Whether every neighbour said goodbye."""
        return self.left.keys() >= set(self.all)

    def up(self, peer: int, now: float) -> None:
        """Take note that a neighbour is connected."""
        self.left.pop(peer, None)
        self.met.add(peer)
        self._silent_since_up.add(peer)
        self.heard(peer, now)

    def down(self, peer: int, now: float) -> None:
        """Take note that a connection ended, or could not be made."""
        if peer in self._silent_since_up:
            self._silent_since_up.discard(peer)
            count, since = self._dismissals.get(peer, (0, now))
            self._dismissals[peer] = count + 1, since

    def frame_came(self, peer: int, now: float) -> None:
        """Take note that a frame came from a neighbour."""
        self._silent_since_up.discard(peer)
        self._dismissals.pop(peer, None)
        self.heard(peer, now)

    def is_dismissed_by(self, peer: int, now: float) -> bool:
        """Return whether a neighbour has for long ended each connection before it sent a frame."""
        count, since = self._dismissals.get(peer, (0, now))
        return count >= _DISMISSALS and now - since > _REFUSED_S

    def heard(self, peer: int, now: float) -> None:
        """Take note that something came from a neighbour."""
        self._heard_at[peer] = self.last_heard_at = now

    def silent_s(self, peer: int, now: float, began_at: float) -> float:
        """Return for how long a neighbour has been away; one that was never there, since this process `began_at`."""
        if self.is_up(peer):
            self._heard_at[peer] = now
        return now - self._heard_at.setdefault(peer, began_at)

    def away_s(self, now: float, began_at: float, lost: Container[int]) -> dict[int, float]:
        """Return for how long each neighbour that is not lost has been away."""
        return {peer: self.silent_s(peer, now, began_at) for peer in self.all if peer not in lost}

    def silences(self, waiting: Collection[int], now: float, began_at: float) -> dict[int, float]:
        """Return for how long each of those that this peer waits for has been away. One that is no neighbour is waited
        for after a loss, and its words come by others: it is away no longer than it is waited for."""
        self._awaited_since = {peer: self._awaited_since.get(peer, now) for peer in {*waiting} - {*self.all}}
        longest = {peer: now - since for peer, since in self._awaited_since.items()}
        return {peer: min(self.silent_s(peer, now, began_at), longest.get(peer, float("inf"))) for peer in waiting}

    def problem(self, peer: int) -> str | None:
        """Return the obstacle to a link to a neighbour, as a sentence."""
        left = f"it left: {printable(self.left[peer])}" if peer in self.left else None
        return self.transport.refusals.get(peer) or left or self.transport.problems.get(peer)

    def give_up_if_refused(self, waiting: Collection[int], now: float) -> None:
        """Raise HandshakeRefused if all these refuse this peer for long: it was started with the wrong configuration.

        One that was let in before stays: then the neighbour is the one that changed, and it can be put right.
        """
        refusals = [self.transport.refusals.get(peer) for peer in waiting if peer not in self.met]
        if not waiting or len(refusals) < len(waiting) or None in refusals:
            self._refused_since = None
            return
        if self._refused_since is None:
            self._refused_since = now
        if now - self._refused_since > _REFUSED_S:
            raise HandshakeRefused(f"none of the neighbours that it waits for lets it in: {refusals[0]}")

    # -- what goes over them -------------------------------------------------------------------------------------------

    def broadcast(self, topic: str, note: bytes, besides: int | None = None) -> None:
        """Send a note to every neighbour that is connected, but not to `besides`."""
        for peer in self.all:
            if peer != besides:
                self.transport.bulletin(peer, topic, note)

    def tell_all_linked(self, topic: str, note: bytes, besides: Collection[int] = ()) -> None:
        """Send a note over all links but those to `besides`, also to members that are no neighbours: the graph without
        those that are away may not lead to them."""
        for peer in sorted(self.transport.neighbors - {*besides}):
            self.transport.bulletin(peer, topic, note)

    def counters(self) -> dict[int, LinkCounters]:
        """Return the transport's counters of the link to each neighbour since this process began."""
        return {peer: self.transport.counters(peer) for peer in self.all}

    def totals(self) -> dict[int, LinkRecord]:
        """Return the traffic of the link to each neighbour since the run began."""
        return {
            peer: self.traffic.total(
                peer,
                counted,
                up=self.is_up(peer),
                offences=self.transport.offences.count(peer),
                last_offence=self.transport.offences.last(peer),
            )
            for peer, counted in self.counters().items()
        }
