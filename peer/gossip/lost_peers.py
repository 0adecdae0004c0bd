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
        self._unreceived: dict[int, list[Message]] = {}
        """Lost peer → own messages that it never got, until they are accounted for between rounds."""

    def add(self, peer: int, unreceived: Sequence[Message], without_it: int) -> None:
        """Treat a peer as lost from round `without_it` on. `unreceived`: the own messages that it has not for good."""
        assert self._views is not None
        self.peers.add(peer)
        self._views.treat_as_absent(peer, without_it)
        self._unreceived[peer] = list(unreceived)

    def take_back_(self) -> list[tuple[int, Message]]:
        """Give the algorithm back what lost peers never had; return it as (lost peer, own message). Between rounds."""
        returned: list[tuple[int, Message]] = []
        for peer, unreceived in self._unreceived.items():
            # What it was sent before that is in what others have heard of it since.
            heard_round = max(report.heard_round for report in self._reports(peer))
            back = [message for message in unreceived if message.round >= heard_round]
            take_back_gifts_(self._algorithm, [message for message in back if message.phase == TRANSFER_PHASE])
            self._algorithm.without(peer, [message for message in back if message.phase == 0])
            returned += [(peer, message) for message in back if message.phase in (0, TRANSFER_PHASE)]
        self._unreceived.clear()
        return returned

    def unheard_reports(self, t: int) -> set[int]:
        """Return the members of round t that have not said yet what they heard of a lost peer that the graph of the
        round still has, or that was to join in the next one.

        Nobody ends the round before they have. By then all know what the lost peer had, from when on it is missing, and
        of every change that was announced before. Afterwards there may be nothing that keeps some from running ahead
        until the graph without the lost peer counts.
        """
        if self._views is None or not self.peers:
            return set()
        membership = self._views.membership
        members = set(membership.members(t))
        # A peer that leaves may be gone before it hears of the loss: it cannot be waited for.
        leaving = {change.subject for change in membership.changes if change.kind is ChangeKind.LEAVE}
        others = members - self.peers - leaving - {self._algorithm.node.peer}
        return {
            other
            for peer in self.peers & {*members, *membership.members(t + 1)}
            for other in others - {report.issuer for report in self._reports(peer)}
        }

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

    def _reports(self, peer: int) -> list[Change]:
        assert self._views is not None
        changes = self._views.membership.changes
        return [change for change in changes if change.kind is ChangeKind.LOST and change.subject == peer]
