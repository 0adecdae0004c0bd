"""Admission of a peer that is no member yet: it asks one of the peers that it is connected to, then another."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from peer.daemon.members.member_links import MemberLinks
from peer.daemon.members.roster import Roster
from peer.daemon.neighbors import Neighbors
from peer.daemon.notes import notes
from peer.daemon.runtime import Runtime
from peer.errors import HandshakeRefused, PeerUnreachable
from peer.foreign_text import quote
from peer.node import membership_codec

log = logging.getLogger("sotto")

ASK_AGAIN_S = 5.0
DECLINED_S = 15.0
"""Give up after this long of nothing but refusals, whomever it asks."""


@dataclass
class Joining:
    """The search of one peer for a sponsor."""

    runtime: Runtime
    neighbors: Neighbors
    member_links: MemberLinks
    roster: Roster
    patience_s: float | None = None
    """Give up after this long of nothing but refusals, whomever it asks, rather than after `DECLINED_S`. A device that
    was lost may find that its loss does not count yet."""
    _sponsor: int | None = field(default=None, init=False)
    _asked_at: float | None = field(default=None, init=False)
    _declined_at: float | None = field(default=None, init=False)
    _declined_because: str = field(default="", init=False)

    def ask(self) -> None:
        """Ask for sponsorship, if it is time to. Raises HandshakeRefused where nobody lets this peer in, and
        PeerUnreachable where the run is over."""
        now, linked = self.runtime.now(), self.member_links.linked()
        patience_s = DECLINED_S if self.patience_s is None else self.patience_s
        if self._declined_at is not None and now > self._declined_at + patience_s:
            raise HandshakeRefused(f"nobody lets it join: {self._declined_because}")
        if linked and all(self.neighbors.left.get(peer) == "completed" for peer in linked):
            raise PeerUnreachable("the run came to its end before this peer could join it")
        self.neighbors.give_up_if_refused(linked, now)
        if self._sponsor is None or not self.neighbors.is_up(self._sponsor):
            self._sponsor = next(iter(self._candidates()), None)
            self._asked_at = None
        if self._sponsor is not None and (self._asked_at is None or now > self._asked_at + ASK_AGAIN_S):
            self._asked_at = now
            log.info("asks %s to let it join", self.roster.name(self._sponsor))
            introduction = self.roster.introduction()
            note = b"" if introduction is None else membership_codec.encode_newcomer(introduction)
            self.neighbors.transport.bulletin(self._sponsor, notes.JOIN, note)

    def declined(self, peer: int, note: bytes) -> None:
        """Take note that the peer that was asked does not let this one join, and why; another one is asked in a
        while. Raises RemoteProtocolError for a note that is none."""
        reason = quote(notes.decode_refusal(note))
        if peer != self._sponsor:
            return  # Nobody can answer for another.
        name = self.roster.name(peer)
        self.neighbors.transport.log.write(log, logging.WARNING, peer, "%s does not let it join: %s", name, reason)
        if self._declined_at is None:
            self._declined_at, self._declined_because = self.runtime.now(), reason
        candidates = self._candidates()
        # In turn, so that everyone is asked whatever the first ones answer.
        self._sponsor = next((other for other in candidates if other > peer), min(candidates, default=None))

    def _candidates(self) -> list[int]:
        return [peer for peer in self.member_links.linked() if self.neighbors.is_up(peer)]
