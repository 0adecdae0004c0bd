"""The links of a peer of a run in rounds while members come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence

from peer.daemon.local_peer import LocalPeer
from peer.daemon.members.admissions import Admissions
from peer.daemon.neighbors import Neighbors
from peer.daemon.watcher import Watcher
from peer.gossip.membership import Change, ChangeKind
from peer.node.durable import DurablePeer

log = logging.getLogger("sotto")

_WORDS = {ChangeKind.JOIN: "joins", ChangeKind.LEAVE: "leaves", ChangeKind.LOST: "is lost and left out"}


class MemberLinks:
    """Keeps the links of a peer in step with the members that it knows of."""

    def __init__(
        self, local: LocalPeer, neighbors: Neighbors, durable: DurablePeer, watcher: Watcher, admissions: Admissions
    ) -> None:
        self._me, self._roster = local.number, local.roster
        self._num_peers, self._first = local.setup.num_peers, frozenset(local.setup.first_members)
        self._neighbors, self._links = neighbors, durable.links
        self._session, self._membership = durable.participant.session, durable.participant.membership
        self._watcher, self._admissions = watcher, admissions
        self._said: frozenset[Change] = frozenset()
        """Changes to come that are in the log."""
        self._for_backlog: set[int] = set()
        """Peers to which this one has made a link only because it owes them frames."""
        self.meets_all = False
        """Whether there are to be links to all members (`LossWatch`)."""

    @property
    def members(self) -> Collection[int]:
        """Participants of the coming round, or of the one under way."""
        members = self._membership.members
        return range(self._num_peers) if members is None else members

    def linked(self) -> Sequence[int]:
        """Return the peers to be linked to: neighbours, those that still need something of this peer or are told of
        changes, and those that may join through it."""
        members = self._membership.members
        if members is None:
            return self._neighbors.all
        owed = {peer for peer, link in list(self._links.out.items()) if link.backlog}
        return sorted((self._wanted(members) | owed) - {self._me} - self._session.lost)

    def _wanted(self, members: Iterable[int]) -> set[int]:
        """Return the peers to be linked to whether or not this one owes them frames."""
        if self._membership.is_member:
            may_join = {peer for peer in self._roster.expected if self._roster.neighbor(peer).dial}
            may_join |= set(range(self._num_peers)) - self._first
            may_join -= {each.subject for each in self._membership.changes}
        else:
            # Any of those that can be dialled will do as a sponsor.
            others = self._first - {self._roster.index}
            may_join = set() if self._membership.has_left else {*map(self._roster.newest, others)}
        all_members = set(members) if self.meets_all else set()
        return {*self._neighbors.all, *self._membership.hearers(), *may_join, *all_members}

    def know_partners(self) -> None:
        """Take over from the participant who the neighbours are now."""
        self._roster.introduce(self._membership.newcomers)
        self._neighbors.set_partners(*self._membership.partners())
        self._admissions.changed(self._membership.changes)

    def meet(self) -> None:
        """Take up the links that a change of the members asks for, and end those to peers that are lost."""
        transport = self._neighbors.transport
        # First: what made the state need a newer release is not for neighbours that do not know it.
        transport.end_older()
        introduced = self._roster.introduce(self._membership.newcomers)
        for peer in introduced:
            transport.know_member(self._roster.name(peer))
        self.know_partners()
        coming = frozenset(self._membership.coming_changes)
        for change in sorted(coming - self._said, key=lambda change: change.effective):
            name = self._roster.name(change.subject)
            is_back = change.kind is ChangeKind.JOIN and self._roster.numbering.incarnation(change.subject) > 0
            words = "takes part again, after it was declared lost," if is_back else _WORDS[change.kind]
            log.info("%s %s from round %d on", name, words, change.effective)
            self._watcher.members_change(change, name)
        self._said = coming
        # A newcomer that called by itself has a link already, but its address was not known then.
        self.add_missing(but_anew=introduced)
        # Only to those that are lost: over a link that is no edge any more, something may still have to go.
        for peer in sorted(transport.neighbors & self._session.lost):
            name = self._roster.name(peer)
            transport.remove_neighbor(peer, f"{name} was declared lost and is out of the run")

    def add_missing(self, *, but_anew: Iterable[int] = ()) -> None:
        """Take up the links that there should be and are not, and those to `but_anew` in any case."""
        there = self._neighbors.transport.neighbors - {*but_anew}
        for peer in sorted({*self.linked()} - there):
            self._neighbors.transport.add_neighbor(self._roster.neighbor(peer))

    def link_up(self, peer: int) -> None:
        """Take note of a link to a peer, before that peer's word about the frames of this one counts."""
        members, link = self._membership.members, self._neighbors.transport.connection(peer)
        if members is None or link is None or not link.dialled or peer in self._wanted(members):
            self._for_backlog.discard(peer)
        else:
            self._for_backlog.add(peer)

    def confirmed(self, peer: int) -> None:
        """Soon end a link that was made for a backlog alone, once there is none.

        The end that dialled ends it: the other one let this peer in (`Incoming.hear`), and calls if it owes something.
        """

        def end() -> None:
            if peer in self._for_backlog and peer not in self.linked():
                self._for_backlog.discard(peer)
                self._neighbors.transport.remove_neighbor(peer, "")

        if peer in self._for_backlog:
            # Not from within a callback of the transport.
            asyncio.get_running_loop().call_soon(end)

    def link_down(self) -> None:
        """Soon end the search for peers that nothing has to go to any more, as if this process began now.

        Those that still owe something to this peer call it.
        """

        def drop() -> None:
            transport = self._neighbors.transport
            if self._membership.members is not None:
                # A change of the members makes neighbours of those before it and of those after it.
                self._neighbors.set_partners(*self._membership.partners())
            for peer in sorted(transport.neighbors - {*self.linked()}):
                if not transport.is_up(peer):
                    transport.remove_neighbor(peer, "")

        # Not from within a callback of the transport.
        asyncio.get_running_loop().call_soon(drop)

    def drop_former(self) -> None:
        """End the search for peers under numbers that they had before."""
        transport = self._neighbors.transport
        for peer in sorted(filter(self._roster.is_former, transport.neighbors)):
            transport.remove_neighbor(peer, f"{self._roster.name(peer)} takes part under another number")

    def still_members(self, names: Iterable[str]) -> list[int]:
        """Return which of these peers are members, or are about to be, and are not about to go."""
        members = {*self.members, *(each.subject for each in self._membership.coming_changes)}
        going = {each.subject for each in self._membership.changes if each.kind is not ChangeKind.JOIN}
        numbers = (self._roster.index_of(name) for name in names)
        return [peer for peer in numbers if peer is not None and peer in members - going]
