"""What a peer makes of news about the members: what it believes, and whom it tells what because of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from peer.errors import LocalProtocolError
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.node.loss_votes import Quorum, decode_vote
from peer.node.membership import PeerMembership

MOST_VERSIONS = 4
"""So many different changes of one kind are believed that an issuer is said to have announced of a subject. An honest
one announces one."""


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What learning of a change asks of the participant."""

    notices: tuple[tuple[int, Change], ...] = ()
    """(receiver, change to tell it), in the order in which they have to be sent."""
    news: tuple[Change, ...] = ()
    """Of what it took note, what may give it other neighbours now."""
    joins: bool = False
    """Whether this peer becomes a member with the change."""


class MembershipNews:
    """Takes note of what was announced and checked (`node.membership_checks`)."""

    def __init__(self, known: PeerMembership) -> None:
        self._known = known
        self._unconfirmed: list[tuple[Change, int | None]] = []
        """(loss, who told of it) that is not believed here: this peer joins, and some that are left have yet to report
        it; or it believes another, and no majority would be left."""

    def learn(self, change: Change, source: int | None = None) -> Learned | None:
        """Take note of a change of the members that was checked, and say whom to tell; `source` told it, None stands
        for this peer's own announcement. Returns None for one that was known, or is not believed (yet)."""
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
            # Others will not say again what this peer was told before it believed it.
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
        """Whether so much was told already in the name of this issuer about this subject that more is not believed."""
        who = (change.kind, change.subject, change.issuer)
        told = [*self._known.changes, *(each for each, _ in self._unconfirmed)]
        return change in told or sum((each.kind, each.subject, each.issuer) == who for each in told) >= MOST_VERSIONS

    def _confirmed(self, membership: Membership) -> list[tuple[Change, int | None]]:
        """Return what is to be believed of the losses that this peer was told of while it joins, and no longer wait.

        It knows too little to judge how old votes are, or which of two parts goes on that take each other for lost. But
        nobody goes on before all that are left have said that they believe a loss: so that is what it waits for.
        """
        reports: dict[int, list[Change]] = {}
        for each, _ in self._unconfirmed:
            reports.setdefault(each.subject, []).append(each)
        together = {*reports}
        while silent := {each for each in together if not self._all_believe(reports[each], together, membership)}:
            together -= silent
        if not together:
            # Those that are left when all of it is true may be too few.
            alone = (each for each in sorted(reports) if self._all_believe(reports[each], {each}, membership))
            together = {*[*alone][:1]}
        believed = [each for each in self._unconfirmed if each[0].subject in together]
        self._unconfirmed = [each for each in self._unconfirmed if each[0].subject not in together]
        return believed

    def _all_believe(self, reports: Sequence[Change], lost: set[int], membership: Membership) -> bool:
        """Whether all members that are left without `lost`, and are most of them, have reported one of these losses."""
        losses = [change for change in membership.changes if change.kind is ChangeKind.LOST]
        known = [*reports, *(change for change in losses if change.subject == reports[0].subject)]
        if any(change.is_certain for change in known):
            return True
        quorum = Quorum(membership, reports[0].subject, [decode_vote(vote) for each in known for vote in each.votes])
        left = quorum.left - lost
        leaving = {change.subject for change in membership.changes if change.kind is ChangeKind.LEAVE}
        silent = left - leaving - {self._known.peer} - {change.issuer for change in known}
        # After an order, those that are left may be any part of the members.
        is_ordered = any(change.is_certain for change in (*losses, *(change for change, _ in self._unconfirmed)))
        return not silent and (quorum.is_majority(left) or (bool(left) and is_ordered))

    def _take_note(self, change: Change, source: int | None) -> Learned:
        """Take note of a change that is believed."""
        known, t = self._known, self._known.session.round
        assert known.views is not None
        membership = known.views.membership
        takes_part = known.peer in membership.members(t)
        joins = change.kind is ChangeKind.JOIN and change.subject == known.peer and not takes_part
        # Before the change is known: the difference it makes decides whom to tell.
        told_before = known.passes_on_to()
        membership.add(change)
        # A second sponsor that knew nothing of the first counts only where it is earlier.
        joins = joins and change in membership.changes_at(change.effective)
        # Before anything is heard of the new neighbours: they may be further ahead than the old graph lets anybody be.
        known.allow_for_changes()
        return Learned(
            notices=tuple(self._notices(membership, change, source, told_before, joins=joins, takes_part=takes_part)),
            # What others say of a loss that is known changes no links.
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
        """Yield whom to tell what because of a change that is new here, in order."""
        known, t = self._known, self._known.session.round
        passes_on_to, hears_own = (hearers - {change.subject} for hearers in (known.passes_on_to(), known.hearers()))
        own_join = (ChangeKind.JOIN, known.peer)
        # Where several may be lost at once, even who told of one may know nothing of another. (Journals of other runs
        # were written by releases that told it nothing.)
        untold = {source} if not known.rules.by_majority or source in told_before else set[int | None]()
        for other in sorted((hears_own if source is None else passes_on_to) - untold):
            # Who has only now become a neighbour to be was told nothing so far.
            coming = membership.changes if other in passes_on_to - told_before else ()
            told = {change, *(each for each in coming if each.effective > t and each.subject != other)}
            if other == source:
                told.discard(change)
            if known.rules.by_majority:
                # Whoever said so knows it; and would not hear it from others, where it lies and has kept nothing of it.
                told = {each for each in told if each.issuer != other}
            # A peer's join before its loss, and the own join first: a peer that is no member yet is not believed.
            in_order = sorted(told, key=lambda each: ((each.kind, each.subject) != own_join, each.order))
            yield from ((other, each) for each in in_order)
        reports = self._own_reports(change.effective if joins else t) if membership.was_ever(known.peer) else []
        for join in membership.applied_after(t) if reports and known.rules.by_majority else ():
            if (join.kind, join.subject) == own_join:
                # Nobody is believed who is not known yet; and not all of them need have heard that this peer joins.
                yield from ((other, join) for other in sorted(hears_own - passes_on_to - {join.issuer}))
        for own in reports:
            membership.add(own)
            yield from ((other, own) for other in sorted(hears_own - {own.subject}))
        is_orphan = known.rules.by_majority and takes_part and change.issuer in known.session.lost
        if change.kind is ChangeKind.JOIN and (change.issuer == known.peer or is_orphan):
            yield from self._introduction(change)
        if change.kind is ChangeKind.LOST and takes_part:
            # Its sponsor may be lost before the new peer has heard a word of it.
            for join in membership.applied_after(t):
                if join.kind is ChangeKind.JOIN and join.issuer == change.subject and join.subject != known.peer:
                    yield from self._introduction(join)

    def _introduction(self, join: Change) -> Iterable[tuple[int, Change]]:
        """Yield what a peer that joins is told, which knows of nothing: of itself last, since with that it begins."""
        history = [each for each in self._known.changes if each != join]
        return ((join.subject, each) for each in (*history, join))

    def _own_reports(self, t: int) -> list[Change]:
        """Return what this peer has to say itself of peers that are lost, and that somebody in round t or a later one
        may still need, for all to know what those had: nothing where it has said so."""
        known = self._known
        assert known.views is not None
        membership = known.views.membership
        # A peer that has left is needed by those who are behind.
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
