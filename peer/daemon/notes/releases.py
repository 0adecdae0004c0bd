"""Releases of the peers of a run, and the point from which features of a newer one may be used.

Features of a protocol version are used only once all members speak it (`all_speak`). A neighbour names its version in
its hello. Every peer tells all others in a note, when it starts and from time to time, signed where the run has
certificates. A member that was silent for long counts as one of the oldest release: it may have changed meanwhile.

Even so a member can go back to an older release unnoticed, in the minutes before its last note is too old. Nothing is
lost by that. The first peer to use something new makes its own state folder one that older releases refuse
(`DiskState.pin`), and so does every peer that hears of it, before it is in a journal. From then on they refuse
neighbours that do not speak it (`needed`). A member that went back just then is refused, with a sentence, until it has
the newer release again; the others wait for it as for any member that is away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from peer.daemon.neighbors import Neighbors
from peer.daemon.notes import notes
from peer.foreign_text import printable
from peer.node.statements import is_later
from peer.proto.sottovoce.v1.note_pb2 import ReleaseNote
from peer.protocol import NEWEST, OLDEST
from peer.rate_limits import Allowances

_TELL_EVERY_S = 600.0
"""A note is half a kilobyte over every link, signature and certificate included."""
_COUNTS_FOR_S = 3 * _TELL_EVERY_S
_NEWS = {"rate": 0.1, "burst": 10.0}
"""Notes of one peer that are looked at and passed on, by second."""


@dataclass(frozen=True)
class _Known:
    """Last report of a peer's release."""

    protocol: int
    software: str
    at: float
    """When, in seconds on the clock of the run."""


class Releases:
    """One peer's knowledge of the releases of all."""

    def __init__(
        self, hearsay: notes.Hearsay, software: str, neighbors: Neighbors, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """`software`: this peer's release. `wall_clock()`: the seconds since 1970."""
        self._hearsay, self._peer, self._now = hearsay, hearsay.own, hearsay.now
        self._software, self._neighbors, self._wall_clock = software, neighbors, wall_clock
        self._known: dict[int, _Known] = {}
        self._notes: dict[int, bytes] = {}
        self._said_ms: dict[int, int] = {}
        self._news = Allowances(**_NEWS)
        self._members: Callable[[], Collection[int]] = tuple
        self._needed: Callable[[], int] = lambda: OLDEST
        self._once_usable = OLDEST

    def follow(self, members: Callable[[], Collection[int]], needed: Callable[[], int]) -> None:
        """Ask these two from now on: who is a member, and which version of the protocol the own state needs."""
        self._members, self._needed = members, needed

    @property
    def needed(self) -> int:
        """The lowest version of the protocol that serves the run, by this peer's state."""
        return self._needed()

    def all_speak(self, protocol: int) -> bool:
        """Whether the features of a protocol version may be used now: the only place that says so."""
        return self.needed >= protocol or all(
            self._protocol(peer) >= protocol for peer in self._members() if peer != self._peer
        )

    def have_spoken(self, protocol: int) -> bool:
        """Whether all members have spoken a version at the same time since this process began: what is refused from
        then on stays refused if one of them says that it is older again. May be asked in any thread."""
        return self._once_usable >= protocol or self.all_speak(protocol)

    def is_older(self, peer: int, protocol: int) -> bool:
        """Whether a peer is known not to speak a version of the protocol."""
        is_known = self._neighbors.is_up(peer) or self._is_fresh(peer)
        return is_known and self._protocol(peer) < protocol

    @property
    def usable(self) -> int:
        """The highest version of the protocol of which everything may be used now."""
        return max(filter(self.all_speak, range(OLDEST, NEWEST + 1)))

    def software(self) -> dict[int, str | None]:
        """Return the release that each member claims to run, fit for a terminal; None where unknown."""
        others = {peer: self._software_of(peer) for peer in self._members() if peer != self._peer}
        return {self._peer: self._software, **others}

    def speaks(self, peer: int, protocol: int) -> None:
        """Take note that a peer to which there may be no link speaks a version of the protocol, as its message
        shows."""
        known = self._known.get(peer)
        self._known[peer] = _Known(protocol, "" if known is None else known.software, self._now())

    # -- what is heard and told ----------------------------------------------------------------------------------------

    def linked(self, peer: int) -> list[bytes]:
        """Take note of a neighbour that is connected; return the notes that it should hear."""
        if (link := self._neighbors.transport.connection(peer)) is not None:
            self._known[peer] = _Known(link.protocol, printable(link.software), self._now())
            self._once_usable = max(self._once_usable, self.usable)
        if self.needed == NEWEST:
            return []  # They are of no use any more.
        if self._peer not in self._notes:
            self._say()
        fresh = {each for each in self._notes if each == self._peer or self._is_fresh(each)} - {peer}
        return [self._notes[subject] for subject in sorted(fresh)]

    def heard(self, source: int, note: bytes) -> None:
        """Judge a note of a neighbour, and pass it on if it is news. Raises RemoteProtocolError if it is malformed."""
        told = notes.decode_release(note)
        is_newer = told.said_ms > self._said_ms.get(told.peer, -1)
        if told.peer == self._peer or not is_later(note, self._notes.get(told.peer, b""), unsigned=is_newer):
            return  # Before the signature is looked at: every neighbour brings the same.
        if self._hearsay.teller(notes.RELEASE, note, told.peer, source, self._news) is not None:
            self._known[told.peer] = _Known(told.protocol_max, told.software, self._now())
            self._notes[told.peer], self._said_ms[told.peer] = note, told.said_ms
            self._once_usable = max(self._once_usable, self.usable)
            self._neighbors.broadcast(notes.RELEASE, note, source)

    async def tell_now_and_then(self) -> None:
        """Repeat this peer's release, until cancelled."""
        while True:
            await asyncio.sleep(_TELL_EVERY_S)
            if self.needed < NEWEST:
                self._say()
                self._neighbors.broadcast(notes.RELEASE, self._notes[self._peer])

    def _say(self) -> None:
        told = ReleaseNote(
            peer=self._peer,
            protocol_max=NEWEST,
            software=self._software[: notes.SOFTWARE_CHARACTERS],
            said_ms=int(self._wall_clock() * 1000),
        )
        self._notes[self._peer] = self._hearsay.statements.sign(notes.RELEASE, told.SerializeToString())

    # -- what is known -------------------------------------------------------------------------------------------------

    def _protocol(self, peer: int) -> int:
        if (link := self._neighbors.transport.connection(peer)) is not None:
            return link.protocol
        return self._known[peer].protocol if self._is_fresh(peer) else OLDEST

    def _is_fresh(self, peer: int) -> bool:
        known = self._known.get(peer)
        return known is not None and self._now() <= known.at + _COUNTS_FOR_S

    def _software_of(self, peer: int) -> str | None:
        if (link := self._neighbors.transport.connection(peer)) is not None:
            return printable(link.software)
        return self._known[peer].software if peer in self._known else None
