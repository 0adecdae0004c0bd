"""Peers that are lost for good: the reports about them, and the mass that comes back from them.

A lost peer took mass with it, and may have given some away that not everybody has seen. All members have to agree on
that amount, or the weights they keep no longer sum up. Each member therefore reports the last round of which it has a
message of the lost peer, and nobody ends another round before all have reported. Mass that a member sent to the lost
peer in the latest reported round, or after it, is in nobody's model and returns to that member.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from peer.gossip.base import Algorithm
from peer.gossip.boundary import TRANSFER_PHASE, take_back_gifts_, transfers
from peer.gossip.membership import Change, ChangeKind
from peer.gossip.replicas import replicas_of
from peer.gossip.views import ViewSchedule
from peer.wire.message import Message


class LostPeers:
    """One peer's knowledge of lost peers, beyond the membership."""

    def __init__(self, algorithm: Algorithm, views: ViewSchedule | None) -> None:
        """`views`: the schedule of the algorithm where members may change; None if nobody can be lost."""
        self._algorithm, self._replicas, self._views = algorithm, replicas_of(algorithm), views
        self.peers: set[int] = set()
        self._new: list[int] = []
        """Peers lost since the round under way began: the algorithm still has their edges."""
        self._unreceived: dict[int, list[Message]] = {}
        """Lost peer → own messages that it never got, until they are accounted for between rounds."""

    def add(self, peer: int, unreceived: Sequence[Message], without_it: int) -> None:
        """Treat a peer as lost from round `without_it` on. `unreceived`: own messages that it does not have for
        good."""
        assert self._views is not None
        self.peers.add(peer)
        self._views.treat_as_absent(peer, without_it)
        self._new.append(peer)
        if unreceived:
            self._unreceived[peer] = list(unreceived)
            if self._replicas is not None:
                self._replicas.keep_own(without_it)

    def settle_(self, t: int) -> list[tuple[int, Message]]:
        """Let the algorithm go on without lost peers, and give back the mass of messages that they never had, once all
        have reported; return those as (lost peer, own message). Called between rounds, before round t."""
        while self._new:
            self._algorithm.without(self._new.pop(0))
        returned: list[tuple[int, Message]] = []
        for peer in [peer for peer in self._unreceived if not self._awaited(peer, t)]:
            unreceived = self._unreceived.pop(peer)
            if self._is_long_gone(peer, t):
                continue  # Nobody that needs it can be so far behind: whoever says that it is lost, lies.
            # Mass that it was sent before that is in later messages of it, which others have heard.
            heard_round = max(report.heard_round for report in self.reports(peer))
            back = [message for message in unreceived if message.round >= heard_round]
            take_back_gifts_(self._algorithm, [message for message in back if message.phase == TRANSFER_PHASE])
            self._algorithm.take_back([message for message in back if message.phase == 0])
            returned += [(peer, message) for message in back if message.phase in (0, TRANSFER_PHASE)]
        return returned

    def is_unsettled(self, t: int) -> bool:
        """Whether mass may still come back from a lost peer, before round t, once others have reported of it."""
        return any(self._awaited(peer, t) for peer in self._unreceived)

    def forget_old_copies(self, t: int) -> None:
        """As round t begins, let the algorithm forget state of rounds from which nothing comes back any more.

        A neighbour that is lost later has told others of a later round.
        """
        replicas, views = self._replicas, self._views
        if replicas is None or views is None or not replicas.keeps_own:
            return
        if not self._unreceived and views.is_steady(t):
            replicas.forget_kept()

    def unheard_reports(self, t: int) -> set[int]:
        """Return the members of round t whose report is missing on a lost peer that the round's graph still has, or
        that was to join in the next one.

        Nobody ends the round before they have reported. By then all know what the lost peer had, since when it is
        missing, and every change announced before. Afterwards nothing may keep some from running ahead until the graph
        without the lost peer counts.
        """
        return {other for peer in self.peers for other in self._unheard(peer, t)}

    def last_heard(
        self, peer: int, t: int, waiting_rounds: Collection[int], *, ordered: bool, has_share: bool
    ) -> int | None:
        """Return the last round of which there is a message of `peer` here, or the round that it was to begin when it
        handed over (x, u); 0 if it is about to join, None if it sends nothing to this peer.

        `t`: the round under way, or the next one; `waiting_rounds`: rounds of its messages that wait for their round;
        `ordered`: whether it sends in every round; `has_share`: whether its transfer at the end of round t is here.
        """
        if self._views is None:
            return None
        message = max(waiting_rounds) if waiting_rounds else self._last_used(peer, t, ordered=ordered)
        # A share holds all that the giver was sent in the round that it ended.
        share = self._last_share(peer, t + has_share)
        return message if share is None else max(share, message or 0)

    def restore(self, lost: Iterable[tuple[int, int]]) -> None:
        """Take back (lost peer, first round without it here) of a state between rounds, when all is accounted for."""
        for peer, since in lost:
            if self._views is None:
                raise ValueError("peers were lost, in a run whose members cannot change")
            self.peers.add(peer)
            self._views.treat_as_absent(peer, since)

    def _last_used(self, peer: int, t: int, *, ordered: bool) -> int | None:
        """Return the last round whose message of `peer` was used before round t."""
        assert self._views is not None
        views, me = self._views, self._algorithm.node.peer
        if peer not in views.membership.members(t) and views.membership.is_coming(peer, t):
            return 0
        last = views.membership.last_round_of(peer, t)
        if last is None or peer not in views.senders_from(last, me):
            return None
        # It may have left, and be lost to peers that are still in a round in which it took part.
        last = min(t - 1, last)
        if ordered:
            return max(0, last)
        # A graph that changes may not have had it in every round.
        return next((round_ for round_ in range(last, 0, -1) if peer in views.senders(round_, me)), 0)

    def _last_share(self, peer: int, t: int) -> int | None:
        """Return the last round up to t before which `peer` handed over a part of (x, u) to this one; None if it never
        did."""
        assert self._views is not None
        views, me, spec = self._views, self._algorithm.node.peer, self._algorithm.spec
        for first in views.membership.rounds_of_change(t) if spec.push_sum else ():
            if any((each.giver, each.taker) == (peer, me) for each in transfers(views, first - 1, spec)):
                return first
        return None

    def _awaited(self, peer: int, t: int) -> set[int]:
        """Return the members of a lost peer's last round that must still report before any mass comes back from it.
        Nobody reports to a peer that has left, and nothing depends on what it has."""
        assert self._views is not None
        membership = self._views.membership
        last = membership.last_round_of(peer, t + 1)
        if last is None or self._is_long_gone(peer, t) or self._algorithm.node.peer not in membership.members(t):
            return set()
        return self._silent(peer, t).intersection(membership.members(last))

    def _is_long_gone(self, peer: int, t: int) -> bool:
        """Whether a peer left so long ago that all have heard of a loss that they needed to hear of."""
        assert self._views is not None
        membership = self._views.membership
        last = membership.last_round_of(peer, t + 1)
        return last is not None and t > last + 3 * self._views.lead(membership.members(t))

    def _unheard(self, peer: int, t: int) -> set[int]:
        assert self._views is not None
        membership = self._views.membership
        if peer not in membership.members(t) and peer not in membership.members(t + 1):
            return set()
        return self._silent(peer, t)

    def _silent(self, peer: int, t: int) -> set[int]:
        """Return the members of round t that have not reported of a lost peer and are to."""
        assert self._views is not None
        membership = self._views.membership
        # A peer that leaves may be gone before it hears of the loss: it cannot be waited for.
        leaving = {change.subject for change in membership.changes if change.kind is ChangeKind.LEAVE}
        reported = {report.issuer for report in self.reports(peer)}
        return {*membership.members(t)} - self.peers - leaving - reported - {self._algorithm.node.peer}

    def reports(self, peer: int) -> list[Change]:
        """Return the members' reports of the loss of a peer."""
        assert self._views is not None
        changes = self._views.membership.changes
        return [change for change in changes if change.kind is ChangeKind.LOST and change.subject == peer]
