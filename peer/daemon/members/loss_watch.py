"""Losses that no person declares: this peer reports peers that it cannot reach, and hears such reports.

`node.loss_votes` holds the decision, and the reason why two parts of a divided cluster never both go on. Here are the
links and the clock. A neighbour in the graph is away while there is no connection to it. Any other member is asked for
its status, once somebody says that it is away; this peer says nothing of one that it cannot dial. From then on there
are links to all members: those by which votes would travel may have been the lost one's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

from peer.daemon.local_peer import LocalPeer
from peer.daemon.members.change_requests import ChangeRequests
from peer.daemon.members.member_links import MemberLinks
from peer.daemon.members.own_loss import status_of
from peer.daemon.neighbors import Neighbors
from peer.daemon.runtime import Runtime
from peer.errors import RemoteProtocolError
from peer.node.loss_votes import LOST
from peer.node.participant import Participant

log = logging.getLogger("sotto")

_MOST_HEARD = 4096


@dataclass
class LossWatch:
    """Watches the members of a run whose members declare losses themselves."""

    local: LocalPeer
    runtime: Runtime
    neighbors: Neighbors
    participant: Participant
    requests: ChangeRequests
    member_links: MemberLinks
    after_s: float

    def __post_init__(self) -> None:
        """Begin without a vote."""
        self._membership = self.participant.membership
        self._votes = self._membership.loss_votes(self.local.statements, after_s=self.after_s)
        self._answered_at: dict[int, float] = {}
        """Member that is no neighbour → when it last answered, or was first asked."""
        self._voted: set[int] = set()
        self._heard: deque[tuple[int, bytes]] = deque(maxlen=_MOST_HEARD)

    def look(self) -> None:
        """Vote, tell the neighbours, and ask for the announcement of decided losses; to be called every second."""
        if not self._membership.is_member:
            return
        now, t, lead = self.runtime.now(), self.participant.round, self._membership.longest_lead
        while self._heard:
            self._hear(*self._heard.popleft(), t, lead)
        for note in self._votes.look(t, lead, self._away_s(now), now):
            self.neighbors.tell_all_linked(LOST, note)
        self.member_links.meets_all = bool(self._votes.suspects)
        if self.member_links.meets_all:
            self.member_links.add_missing()
        for subject in sorted(self._votes.own - self._voted):
            name, (count, of) = self.local.roster.name(subject), self._votes.count(subject)
            log.warning(
                "%s has been away for %g s: this peer votes for going on without it, as %d of %d members do; more than"
                " half have to",
                name,
                self.after_s,
                count,
                of,
            )
        self._voted = self._votes.own
        for subject, votes in self._votes.decided(now):
            self.requests.declare_lost(subject, votes=votes)

    def heard(self, source: int, note: bytes) -> None:
        """Keep a neighbour's vote for `look`: the participant may be at work now. The oldest go unread if too many come
        at once."""
        self._heard.append((source, note))
        self.runtime.wake()

    def _hear(self, source: int, note: bytes, t: int, lead: int) -> None:
        """Judge a vote, and pass it on if it is news."""
        try:
            if self._votes.hear(note, t, lead):
                self.neighbors.tell_all_linked(LOST, note, {source})
        except RemoteProtocolError as error:
            self.neighbors.transport.blame(source if error.peer is None else error.peer, error)

    async def ask_suspects(self) -> None:
        """Ask members that are no neighbours, and that somebody cannot reach, whether they are there."""
        while True:
            for peer in sorted(self._votes.suspects - {*self.neighbors.all, self.local.number}):
                if peer in self.local.roster and (address := self.local.roster[peer].advertise) is not None:
                    self._answered_at.setdefault(peer, self.runtime.now())
                    if await self._answers(peer, address):
                        self._answered_at[peer] = self.runtime.now()
            for peer in self._answered_at.keys() - self._votes.suspects:
                del self._answered_at[peer]
            await asyncio.sleep(max(0.2, self.after_s / 4))

    def figures(self) -> list[dict[str, object]]:
        """Return the peers that members cannot reach, as JSON values."""
        name = self.local.roster.name
        counts = {subject: self._votes.count(subject) for subject in sorted(self._votes.suspects)}
        return [{"name": name(subject), "votes": count, "of": of} for subject, (count, of) in counts.items()]

    async def _answers(self, peer: int, address: str) -> bool:
        name, access = self.local.roster.name(peer), self.local.access
        return await status_of(name, address, access) is not None

    def _away_s(self, now: float) -> dict[int, float]:
        away_s = self.neighbors.away_s(now, self.runtime.began_at, self.participant.session.lost)
        return {peer: now - at for peer, at in self._answered_at.items()} | away_s
