"""Peers that are lost for good: who has reported what of them, and which mass comes back from them.

A lost peer took mass with it, and may have given some away that not everybody has seen. All members have to agree on
how much that was, or the weights they keep no longer sum up. So each member reports the last round of which it has a
message of the lost peer, and nobody ends another round before all have reported. What a member sent to the lost peer
in the latest round of all reports, or after it, is in nobody's model: that mass returns to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from peer.gossip.base import Algorithm
from peer.gossip.boundary import TRANSFER_PHASE, take_back_gifts_
from peer.gossip.membership import Change, ChangeKind
from peer.gossip.views import ViewSchedule
from peer.wire.message import Message


class LostPeers:
    """What one peer knows of those that are lost, beside what the membership says."""

    def __init__(self, algorithm: Algorithm, views: ViewSchedule | None) -> None:
        """`views`: the schedule of the algorithm where members may change; None where nobody can be lost."""
        self._algorithm, self._views = algorithm, views
        self.peers: set[int] = set()
        self._new: list[int] = []
        """Lost since the round under way began: the algorithm still has their edges."""
        self._unreceived: dict[int, list[Message]] = {}
        """Lost peer → own messages that it never got, until they are accounted for between rounds."""

    def add(self, peer: int, unreceived: Sequence[Message], without_it: int) -> None:
        """Treat a peer as lost from round `without_it` on. `unreceived`: the own messages that it has not for good."""
        assert self._views is not None
        self.peers.add(peer)
        self._views.treat_as_absent(peer, without_it)
        self._new.append(peer)
        if unreceived:
            self._unreceived[peer] = list(unreceived)
            if self._algorithm.replicas is not None:
                self._algorithm.replicas.keep_own(without_it)

    def settle_(self, t: int) -> list[tuple[int, Message]]:
        """Let the algorithm go on without lost peers, and give it back what they never had, as far as all have reported
        of them; return that as (lost peer, own message). Between rounds, before round t."""
        while self._new:
            self._algorithm.without(self._new.pop(0))
        returned: list[tuple[int, Message]] = []
        for peer in [peer for peer in self._unreceived if not self._awaited(peer, t)]:
            # What it was sent before that is in what others have heard of it since.
            heard_round = max(report.heard_round for report in self._reports(peer))
            back = [message for message in self._unreceived.pop(peer) if message.round >= heard_round]
            take_back_gifts_(self._algorithm, [message for message in back if message.phase == TRANSFER_PHASE])
            self._algorithm.take_back([message for message in back if message.phase == 0])
            returned += [(peer, message) for message in back if message.phase in (0, TRANSFER_PHASE)]
        return returned

    def is_unsettled(self, t: int) -> bool:
        """Whether something may still come back of a lost peer, before round t, when others have reported of it."""
        return any(self._awaited(peer, t) for peer in self._unreceived)

    def forget_old_copies(self, t: int) -> None:
        """Let the algorithm forget what leads back to rounds of which nothing comes back any more, as round t begins.

        A neighbour that is lost later has told others of a later round.
        """
        replicas = self._algorithm.replicas
        if replicas is not None and replicas.keeps_own and self._views is not None and self._views.is_steady(t):
            replicas.forget_kept()

    def unheard_reports(self, t: int) -> set[int]:
        """Return the members of round t that have not said yet what they heard of a lost peer that the graph of the
        round still has, or that was to join in the next one.

        Nobody ends the round before they have. By then all know what the lost peer had, from when on it is missing, and
        of every change that was announced before. Afterwards there may be nothing that keeps some from running ahead
        until the graph without the lost peer counts.
        """
        return {other for peer in self.peers for other in self._unheard(peer, t)}

    def last_heard(self, peer: int, t: int, waiting_rounds: Collection[int], *, ordered: bool) -> int | None:
        """Return the last round of which there is a message of `peer` here; 0 if it is about to join, None if it sends
        nothing to this peer.

        `t`: the round under way, or the next one; `waiting_rounds`: of its messages that wait for their round;
        `ordered`: whether it sends in every round.
        """
        if self._views is None:
            return None
        if waiting_rounds:
            return max(waiting_rounds)
        me, membership = self._algorithm.node.peer, self._views.membership
        if peer not in membership.members(t) and membership.is_coming(peer, t):
            return 0
        if peer not in self._views.senders_from(t, me):
            return None
        if ordered:
            return max(0, t - 1)
        # A graph that changes may not have had it in every round.
        return next((round_ for round_ in range(t - 1, 0, -1) if peer in self._views.senders(round_, me)), 0)

    def restore(self, lost: Iterable[tuple[int, int]]) -> None:
        """Take back (lost peer, first round without it here) of a state between rounds, when all is accounted for."""
        for peer, since in lost:
            if self._views is None:
                raise ValueError("peers were lost, in a run whose members cannot change")
            self.peers.add(peer)
            self._views.treat_as_absent(peer, since)

    def _awaited(self, peer: int, t: int) -> set[int]:
        """Return who has yet to report of a lost peer before anything comes back of it; nobody reports to a peer that
        has left, nor does anything depend on what it has."""
        assert self._views is not None
        is_member = self._algorithm.node.peer in self._views.membership.members(t)
        return self._unheard(peer, t) if is_member else set()

    def _unheard(self, peer: int, t: int) -> set[int]:
        assert self._views is not None
        membership = self._views.membership
        members = set(membership.members(t))
        if peer not in members and peer not in membership.members(t + 1):
            return set()
        # A peer that leaves may be gone before it hears of the loss: it cannot be waited for.
        leaving = {change.subject for change in membership.changes if change.kind is ChangeKind.LEAVE}
        reported = {report.issuer for report in self._reports(peer)}
        return members - self.peers - leaving - reported - {self._algorithm.node.peer}

    def _reports(self, peer: int) -> list[Change]:
        assert self._views is not None
        changes = self._views.membership.changes
        return [change for change in changes if change.kind is ChangeKind.LOST and change.subject == peer]
