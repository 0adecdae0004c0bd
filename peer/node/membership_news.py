"""A peer's handling of news about the members: its beliefs, and the notices that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from peer.errors import LocalProtocolError
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.node.loss_votes import Quorum, decode_vote
from peer.node.membership import PeerMembership

MOST_VERSIONS = 4
"""Most different changes of one kind that are believed of one issuer about one subject. An honest one announces one."""


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Consequences of a change for the participant."""

    notices: tuple[tuple[int, Change], ...] = ()
    """(receiver, change to tell it), in the order in which they have to be sent."""
    news: tuple[Change, ...] = ()
    """Changes noted that may give it other neighbours now."""
    joins: bool = False
    """Whether this peer becomes a member with the change."""


class MembershipNews:
    """Notes announced changes that were checked (`node.membership_checks`)."""

    def __init__(self, known: PeerMembership) -> None:
        self._known = known
        self._unconfirmed: list[tuple[Change, int | None]] = []
        """(loss, peer that told of it) not believed here yet: this peer joins, and some of the peers left have yet to
        report it; or it believes another loss, and no majority would be left."""

    def learn(self, change: Change, source: int | None = None) -> Learned | None:
        """Note a checked change of the members and return its consequences; `source` told it, None stands for this
        peer's own announcement. Returns None for a change that was known, or is not believed (yet)."""
        known = self._known
        if known.views is None:
            raise LocalProtocolError(f"a change of members: {known.rules.why_no_changes}")
        membership, t = known.views.membership, known.session.round
        if change in membership.changes or (source is not None and self._is_excess(change)):
            return None
        believed = [(change, source)]
        is_doubtful = known.is_joining and not known.is_lost(change.subject)
        if known.rules.by_majority and change.kind is ChangeKind.LOST and source is not None and is_doubtful:
            self._unconfirmed += believed
            believed = self._confirmed(membership)
        elif known.rules.by_majority and change.kind is ChangeKind.LOST and known.peer in membership.members(t):
            if not known.leaves_majority(change):
                # Two parts of the cluster take each other for lost: an operator has to decide.
                self._unconfirmed += believed
                return None
            # Others will not repeat news that this peer heard before it believed it.
            said = [each for each in self._unconfirmed if each[0].subject == change.subject and each[0] != change]
            believed += said
            self._unconfirmed = [each for each in self._unconfirmed if each[0].subject != change.subject]
        found = [self._take_note(each, source) for each, source in believed]
        if not found:
            return None
        return Learned(
            notices=tuple(notice for learned in found for notice in learned.notices),
            news=tuple(each for learned in found for each in learned.news),
            joins=any(learned.joins for learned in found),
        )

    def _is_excess(self, change: Change) -> bool:
        """Whether a change was told already, or too many of its issuer about its subject were to believe another."""
        who = (change.kind, change.subject, change.issuer)
        told = [*self._known.changes, *(each for each, _ in self._unconfirmed)]
        return change in told or sum((each.kind, each.subject, each.issuer) == who for each in told) >= MOST_VERSIONS

    def _confirmed(self, membership: Membership) -> list[tuple[Change, int | None]]:
        """Remove and return those losses to be believed now of which this peer was told while it joins.

        It knows too little to judge the age of votes, or which of two parts that take each other for lost goes on. But
        nobody goes on before all peers left have said that they believe a loss, so it waits for that.
        """
        reports: dict[int, list[Change]] = {}
        for each, _ in self._unconfirmed:
            reports.setdefault(each.subject, []).append(each)
        together = {*reports}
        while silent := {each for each in together if not self._all_believe(reports[each], together, membership)}:
            together -= silent
        if not together:
            # If all of them are true, too few peers may be left.
            alone = (each for each in sorted(reports) if self._all_believe(reports[each], {each}, membership))
            together = {*[*alone][:1]}
        believed = [each for each in self._unconfirmed if each[0].subject in together]
        self._unconfirmed = [each for each in self._unconfirmed if each[0].subject not in together]
        return believed

    def _all_believe(self, reports: Sequence[Change], lost: set[int], membership: Membership) -> bool:
        """Whether all members left without `lost` are a majority and have reported one of these losses."""
        losses = [change for change in membership.changes if change.kind is ChangeKind.LOST]
        known = [*reports, *(change for change in losses if change.subject == reports[0].subject)]
        if any(change.is_certain for change in known):
            return True
        quorum = Quorum(membership, reports[0].subject, [decode_vote(vote) for each in known for vote in each.votes])
        left = quorum.left - lost
        leaving = {change.subject for change in membership.changes if change.kind is ChangeKind.LEAVE}
        silent = left - leaving - {self._known.peer} - {change.issuer for change in known}
        # After an order, the peers left may be any part of the members.
        is_ordered = any(change.is_certain for change in (*losses, *(change for change, _ in self._unconfirmed)))
        return not silent and (quorum.is_majority(left) or (bool(left) and is_ordered))

    def _take_note(self, change: Change, source: int | None) -> Learned:
        """Note a change that is believed."""
        known, t = self._known, self._known.session.round
        assert known.views is not None
        membership = known.views.membership
        takes_part = known.peer in membership.members(t)
        joins = change.kind is ChangeKind.JOIN and change.subject == known.peer and not takes_part
        # Before the change is known: the difference that it makes decides which peers to tell.
        told_before = known.passes_on_to()
        membership.add(change)
        # A second sponsor that knew nothing of the first counts only where it is earlier.
        joins = joins and change in membership.changes_at(change.effective)
        # Before anything is heard of the new neighbours: they may be further ahead than the old graph lets anybody be.
        known.allow_for_changes()
        return Learned(
            notices=tuple(self._notices(membership, change, source, told_before, joins=joins, takes_part=takes_part)),
            # Further reports of a known loss change no links.
            news=() if change.subject in known.session.lost else (change,),
            joins=joins,
        )

    def _notices(
        self,
        membership: Membership,
        change: Change,
        source: int | None,
        told_before: set[int],
        *,
        joins: bool,
        takes_part: bool,
    ) -> Iterable[tuple[int, Change]]:
        """Yield (receiver, change to tell it) after a change that is new here, in order."""
        known, t = self._known, self._known.session.round
        passes_on_to, hears_own = (hearers - {change.subject} for hearers in (known.passes_on_to(), known.hearers()))
        own_join = (ChangeKind.JOIN, known.peer)
        # Where several may be lost at once, even the peer that told of one may not know another. (Journals of other
        # runs were written by releases that told it nothing.)
        untold = {source} if not known.rules.by_majority or source in told_before else set[int | None]()
        for other in sorted((hears_own if source is None else passes_on_to) - untold):
            # A peer that has only now become a coming neighbour was told nothing so far; one that only hears of losses
            # may have had no other way to hear of a change than through the peer that is lost.
            coming = membership.changes if other not in passes_on_to & told_before else ()
            told = {change, *(each for each in coming if each.effective > t and each.subject != other)}
            if other == source:
                told.discard(change)
            if known.rules.by_majority:
                # The issuer knows it, and would not accept it from others if it lies and has kept nothing of it.
                told = {each for each in told if each.issuer != other}
            # A peer's join before its loss, and the own join first: a peer that is no member yet is not believed.
            in_order = sorted(told, key=lambda each: ((each.kind, each.subject) != own_join, each.order))
            yield from ((other, each) for each in in_order)
        reports = self._own_reports(change.effective if joins else t) if membership.was_ever(known.peer) else []
        if reports and known.rules.by_majority:
            # Unknown peers are not believed; and not all receivers need have heard that this peer joins, or of others.
            changes = [each for each in membership.applied_after(t) if each.kind is not ChangeKind.LOST]
            for each in sorted(changes, key=lambda each: ((each.kind, each.subject) != own_join, each.order)):
                yield from ((other, each) for other in sorted(hears_own - passes_on_to - {each.issuer, each.subject}))
        for own in reports:
            membership.add(own)
            yield from ((other, own) for other in sorted(hears_own - {own.subject}))
        is_orphan = known.rules.by_majority and takes_part and change.issuer in known.session.lost
        offers = [each for each in known.changes if (each.kind, each.subject) == (ChangeKind.JOIN, change.subject)]
        # The new peer may have heard of the later of two sponsors alone, and the earlier one be lost before it tells.
        has_rivals = takes_part and len(offers) > 1 and offers[0].effective > t
        if change.kind is ChangeKind.JOIN and (change.issuer == known.peer or is_orphan or has_rivals):
            yield from self._introduction(offers[0])
        if change.kind is ChangeKind.LOST and takes_part:
            # Its sponsor may be lost before the new peer has heard a word of it.
            for join in membership.applied_after(t):
                if join.kind is ChangeKind.JOIN and join.issuer == change.subject and join.subject != known.peer:
                    yield from self._introduction(join)

    def _introduction(self, join: Change) -> Iterable[tuple[int, Change]]:
        """Yield the notices for a joining peer, which knows of nothing: its own join last, since with that it
        begins."""
        history = [each for each in self._known.changes if (each.kind, each.subject) != (join.kind, join.subject)]
        return ((join.subject, each) for each in (*history, join))

    def _own_reports(self, t: int) -> list[Change]:
        """Return this peer's own reports on lost peers that somebody in round t or a later one may still need, for all
        to know which messages those had; none that it has made already."""
        known = self._known
        assert known.views is not None
        membership = known.views.membership
        # A departed peer's report is needed by peers that are behind.
        since = max(0, t - 2 * known.longest_lead)
        losses = {change.subject: change for change in reversed(known.changes) if change.kind is ChangeKind.LOST}
        said = {
            change.subject for change in known.changes if (change.kind, change.issuer) == (ChangeKind.LOST, known.peer)
        }
        return [
            known.signed(replace(loss, issuer=known.peer, heard_round=known.session.last_heard(subject) or 0, told=b""))
            for subject, loss in sorted(losses.items())
            if membership.is_coming(subject, since) and subject not in said
        ]
