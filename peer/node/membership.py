"""One peer's knowledge of the members of its run, and the peers to which it passes news of them.

Nobody coordinates. A change counts from a round before which every member will have heard of it, because frames come in
order and nobody is further ahead than the graph lets it. This file knows the peers that have to be told.
`membership_planning` knows when it is too late to announce a change, `membership_checks` refuses changes,
`membership_news` believes them. The effect of a change on mass and replicas is in `gossip.boundary`, that of a loss on
a round in `gossip.lost_peers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from peer.errors import LocalProtocolError, StateError
from peer.gossip import boundary
from peer.gossip.incarnations import MAX_INCARNATIONS, Numbering
from peer.gossip.membership import Change, ChangeKind, Newcomer
from peer.gossip.replicas import replicas_of
from peer.gossip.session import Session
from peer.gossip.views import ViewSchedule
from peer.node import membership_codec
from peer.node.loss_grounds import LossGrounds
from peer.node.loss_votes import LossVotes, Quorum, decode_vote
from peer.node.statements import OwnWords, Statements, Unsigned


@dataclass(frozen=True, kw_only=True)
class MembershipRules:
    """Rules by which the members of a run may change, and by which announcements are believed."""

    why_no_changes: str | None = None
    """A sentence if members cannot change in this run; None: they can, and the schedule is a `ViewSchedule`."""
    check_members: Callable[[tuple[int, ...]], None] = lambda members: None
    """Raises ConfigError for members with which the run cannot go on."""
    num_listed: int | None = None
    """Number of peers that everybody lists; None: all that the schedule knows. Any other is a newcomer."""
    check_newcomer: Callable[[int, Newcomer], None] = lambda peer, newcomer: None
    """`check_newcomer(peer, newcomer)` raises ConfigError or SecurityError unless the newcomer is that peer. Its answer
    must never change: a replay asks again."""
    statements: Statements | None = None
    """Signs this peer's statements about members."""
    by_majority: bool = False
    """Whether members declare losses themselves (`node.loss_votes`)."""
    name_of: Callable[[int], str] = "peer {}".format
    """The name of the peer that an operator's order is about."""
    word_suffices: Callable[[], bool] = lambda: False
    """Whether the signed word of one member still suffices for a loss, because some run a release before 0.3. Such a
    release asks for no more unless members declare losses themselves. Called when a loss is heard, never by a
    replay."""
    why_no_rejoin: str | None = None
    """A sentence if no lost peer may take part again, the same on all devices; None: it may."""


class PeerMembership:
    """One peer's knowledge of the members of its run."""

    def __init__(self, session: Session, rules: MembershipRules, *, max_lead: int) -> None:
        node = session.algorithm.node
        self.peer = node.peer
        self.session, self.rules = session, rules
        self.views = changing_views(node.schedule, rules.why_no_changes)
        """The schedule that follows the members; None if these cannot change."""
        self.statements: Statements = rules.statements or Unsigned()
        self.own_words = OwnWords(self.statements, membership_codec.MAGIC)
        self.numbering = Numbering(node.schedule.num_peers if rules.num_listed is None else rules.num_listed)
        self._max_lead = max_lead

    # Knowledge.

    @property
    def is_member(self) -> bool:
        """Whether this peer takes part in the coming round, or the one under way."""
        if self.views is None or self.session.in_round:
            return True
        return self.peer in self.views.membership.members(self.session.round)

    @property
    def is_outsider(self) -> bool:
        """Whether it never was a member, and has not heard yet that it becomes one."""
        return self.views is not None and not self.views.membership.was_ever(self.peer)

    @property
    def is_joining(self) -> bool:
        """Whether this peer waits for the model with which it joins, in a round that the others have yet to end."""
        assert self.views is not None
        return self.session.in_round and self.peer not in self.views.membership.members(self.session.round)

    @property
    def has_left(self) -> bool:
        """Whether this peer was a member and has handed over its mass."""
        return not self.is_member and self.session.round > 0

    def is_gone(self, peer: int) -> bool:
        """Whether another peer was a member and left, or is lost."""
        t = self.session.round
        if self.views is None or peer in self.views.membership.members(t):
            return False
        ended = (change for change in self.changes if change.kind is not ChangeKind.JOIN)
        return any(change.subject == peer and change.effective <= t for change in ended)

    def standing(self, peer: int) -> str:
        """Return the standing of a peer in the coming round, or the one under way: "member", "left", "lost", "joining"
        or "not joined"."""
        if self.views is None or peer in self.views.membership.members(self.session.round):
            return "member"
        if self.is_gone(peer):
            kinds = {change.kind for change in self.changes if change.subject == peer}
            return "lost" if ChangeKind.LOST in kinds else "left"
        return "joining" if self.views.membership.is_coming(peer, self.session.round) else "not joined"

    @property
    def members(self) -> tuple[int, ...] | None:
        """Members of the coming round, or the one under way; None if members cannot change."""
        return None if self.views is None else self.views.membership.members(self.session.round)

    @property
    def changes(self) -> tuple[Change, ...]:
        """All changes of the members that are known, past ones too."""
        return () if self.views is None else self.views.membership.changes

    @property
    def coming_changes(self) -> tuple[Change, ...]:
        """Known changes after the coming round, or the one under way."""
        return () if self.views is None else self.views.membership.applied_after(self.session.round)

    @property
    def newcomers(self) -> Mapping[int, Newcomer]:
        """Peers that joined, or are about to, without being in everybody's list."""
        return {} if self.views is None else self.views.membership.newcomers

    @property
    def num_numbers(self) -> int:
        """Bound below which the peer numbers in others' news are. For a joining peer it covers all that may ever take
        part, since it may hear a peer's news before it hears of the peer."""
        if self.is_outsider:
            return self.numbering.stride * MAX_INCARNATIONS
        return self.session.algorithm.node.schedule.num_peers

    def is_lost(self, peer: int) -> bool:
        """Whether this peer believes any loss of another."""
        return any((change.kind, change.subject) == (ChangeKind.LOST, peer) for change in self.changes)

    @property
    def to_lose(self) -> tuple[int, ...]:
        """Lost peers that the session still counts on, ascending: `Participant.lose` has to be called for them."""
        lost = {change.subject for change in self.changes if change.kind is ChangeKind.LOST}
        return tuple(sorted(lost - self.session.lost))

    def why_not_again(self, number: int, effective: int) -> str | None:
        """Return why a device may not take part under this number from round `effective` on, where it has taken part
        before under another; None if it may. Two incarnations of a device are never members at once."""
        former = self.numbering.former(number)
        if former is None:
            return None
        if self.rules.why_no_rejoin is not None:
            return self.rules.why_no_rejoin
        assert self.views is not None
        if not self.is_lost(former):
            return f"peer {former}, which it was before, is not lost"
        if self.views.membership.is_coming(former, max(0, effective - 1)):
            return f"the loss of peer {former}, which it was before, does not count yet"
        return None

    @property
    def is_signed(self) -> bool:
        """Whether this run has certificates, with which members sign their statements."""
        return not isinstance(self.statements, Unsigned)

    @property
    def grounds(self) -> LossGrounds:
        """Judge of losses for this peer. Raises LocalProtocolError if nobody can be lost."""
        if self.views is None:
            raise LocalProtocolError(f"a loss: {self.rules.why_no_changes}")
        return LossGrounds(
            membership=self.views.membership,
            statements=self.statements,
            numbering=self.numbering,
            name_of=self._name_of,
            counts_votes=self.rules.by_majority,
        )

    def _name_of(self, number: int) -> str:
        # The news that it joins may not have got around in this process yet.
        newcomer = self.newcomers.get(number)
        return self.rules.name_of(number) if newcomer is None else newcomer.name

    def leaves_majority(self, change: Change) -> bool:
        """Whether this peer may believe a loss that is proven: see `node.loss_votes`. A replay gives the same
        answer."""
        assert self.views is not None
        # All reports on a peer that is lost already count, whatever their grounds: they are waited for.
        if change.is_certain or not change.votes or self.is_lost(change.subject):
            return True
        return Quorum(self.views.membership, change.subject, [decode_vote(each) for each in change.votes]).may_go_on

    # Peers to tell.

    def partners(self) -> tuple[set[int], set[int]]:
        """Return (senders to this peer, receivers of it), now and with coming members as far as they are known."""
        me = self.peer
        if self.views is None:
            schedule = self.session.algorithm.node.schedule
            return set(schedule.all_senders(me)), set(schedule.all_receivers(me))
        views, senders, receivers = self.views, set[int](), set[int]()
        now = self.session.round
        for t in (now, *(change.effective for change in self.coming_changes)):
            senders |= set(views.senders_from(t, me))
            receivers |= set(views.receivers_from(t, me))
            # With a sponsor or an heir there is something to exchange even where the graph has no edge.
            others = boundary.partners(views, t - 1, me, self.session.algorithm.spec) if t > now else set()
            senders, receivers = senders | others, receivers | others
        return senders - self.session.lost, receivers - self.session.lost

    def hearers(self) -> set[int]:
        """Return the receivers of this peer's own news: those to which it passes changes on. Where members declare
        losses themselves, after a loss they are all members that are not lost here.

        Others may have declared another peer lost meanwhile. If the two lost peers stood between the parts, neither
        graph has an edge by which one part hears of the other's beliefs, and each would wait for the other's reports.
        """
        hearers = self.passes_on_to()
        if not self.rules.by_majority or not self.is_member or not self.awaits_loss or self.views is None:
            return hearers
        return hearers | ({*self.views.membership.members(self.session.round)} - self.session.lost - {self.peer})

    def passes_on_to(self) -> set[int]:
        """Return the peers to which this one passes changes on: its partners, and after a loss also peers about to
        leave, which in turn tell every member.

        All others hear of the loss along the graph without the lost peer. That graph has no place for a peer that
        leaves before, whose only connection may have been the lost one.
        """
        senders, receivers = self.partners()
        hearers = senders | receivers
        if self.views is None or not self.awaits_loss:
            return hearers
        t, membership = self.session.round, self.views.membership
        # They may still be in rounds that are over here.
        recent = membership.applied_after(t - self.longest_lead)
        leaving = {change.subject for change in recent if change.kind is ChangeKind.LEAVE}
        others = set(membership.members(t)) if self.peer in leaving else leaving
        return hearers | (others - self.session.lost - {self.peer})

    @property
    def awaits_loss(self) -> bool:
        """Whether a loss is known that counts from a later round."""
        return any(change.kind is ChangeKind.LOST for change in self.coming_changes)

    @property
    def longest_lead(self) -> int:
        """Rounds that a peer can be ahead of another, with present and coming members."""
        if self.views is None:
            return self._max_lead
        coming = self.views.membership.coming(self.session.round)
        return max(self._max_lead, *(self.views.lead(members) for members in coming))

    def allow_for_changes(self) -> None:
        """Accept neighbours as far ahead as they can be while members change: notices travel with the frames."""
        self.session.max_lead = 4 * self.longest_lead + 4

    # Statements.

    def signed(self, change: Change) -> Change:
        """Return a change that this peer announces or reports, with its proof where the run has certificates."""
        frame = membership_codec.encode(change)
        told = self.own_words.signed(frame)
        return change if told == frame else replace(change, told=told)

    def proofs_of_loss(self) -> dict[int, bytes]:
        """Return lost peer → a frame that proves its loss to it, or where there is no proof, a member's word."""
        losses = [change for change in self.changes if change.kind is ChangeKind.LOST]
        losses.sort(key=lambda change: change.has_grounds)
        return {change.subject: membership_codec.encode(change) for change in losses}

    def loss_votes(self, statements: Statements, *, after_s: float) -> LossVotes:
        """Return this peer's votes on losses. Raises LocalProtocolError if nobody can be lost."""
        if self.views is None or not self.rules.by_majority:
            raise LocalProtocolError(f"a loss: {self.rules.why_no_changes or 'members do not declare losses here'}")
        return LossVotes(self.peer, self.views.membership, statements, after_s=after_s)

    # State.

    def state(self) -> list[list[Any]]:
        """Return all changes as JSON values."""
        return [] if self.views is None else self.views.membership.state()

    def restore(self, changes: Sequence[Sequence[Any]]) -> None:
        """Restore a result of `state`; the session is to be restored between this and `restore_edges`. Raises
        StateError if members cannot change any more, ValueError or TypeError if it cannot be such a state."""
        if self.views is not None:
            self.views.membership.restore(changes)
        elif changes:
            raise StateError(f"the members changed in the run of this checkpoint: {self.rules.why_no_changes}")

    def restore_edges(self) -> None:
        """Go back to the edges of the round that the session is in."""
        if self.views is None or self.views.membership.is_settled:
            return
        self.allow_for_changes()
        self.views.enter(self.session.round)
        replicas = replicas_of(self.session.algorithm)
        if replicas is not None:
            senders, receivers = self.views.all_senders(self.peer), self.views.all_receivers(self.peer)
            replicas.change_edges(senders, receivers, self.session.round)


def changing_views(schedule: object, why_no_changes: str | None) -> ViewSchedule | None:
    """Return a schedule as the one that follows the members, where these can change."""
    return schedule if isinstance(schedule, ViewSchedule) and why_no_changes is None else None
