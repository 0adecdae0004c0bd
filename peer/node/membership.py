"""One peer's part in membership changes: which it may announce, which it believes, and whom it tells of them.

Nobody coordinates. A change counts from a round before which every member will have heard of it, because frames come in
order and nobody is further ahead than the graph lets it. So this file is about who has to be told, and when it is too
late. What a change does to mass and replicas is in `gossip.boundary`, what a loss does to a round in
`gossip.lost_peers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from peer.errors import ConfigError, LocalProtocolError, RemoteProtocolError, SecurityError, StateError
from peer.gossip import boundary
from peer.gossip.incarnations import MAX_INCARNATIONS, Numbering
from peer.gossip.membership import Change, ChangeKind, Membership, Newcomer, members_after
from peer.gossip.session import Session
from peer.gossip.views import ViewSchedule
from peer.node import membership_codec
from peer.node.loss_votes import LOST, ORDER, LossVote, LossVotes, Quorum, decode_vote, is_current, ordered
from peer.node.statements import MEMBERS, OwnWords, Statements, Unsigned, counter_of

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


class PeerMembership:
    """What one peer knows, announces and passes on of the members of its run."""

    def __init__(
        self,
        session: Session,
        *,
        max_lead: int,
        why_no_changes: str | None = None,
        check_members: Callable[[tuple[int, ...]], None] = lambda members: None,
        num_listed: int | None = None,
        check_newcomer: Callable[[int, Newcomer], None] = lambda peer, newcomer: None,
        statements: Statements | None = None,
        by_majority: bool = False,
        name_of: Callable[[int], str] = "peer {}".format,
        why_no_rejoin: str | None = None,
        may_rejoin_now: Callable[[], bool] = lambda: True,
    ) -> None:
        """See `Participant`, whose arguments these are."""
        self._by_majority, self._name_of = by_majority, name_of
        self._why_no_rejoin, self._may_rejoin_now = why_no_rejoin, may_rejoin_now
        self._statements: Statements = statements or Unsigned()
        self.own_words = OwnWords(self._statements, membership_codec.MAGIC)
        node = session.algorithm.node
        self.peer = node.peer
        self._session, self._algorithm = session, session.algorithm
        self._schedule = node.schedule
        self._views = changing_views(session.algorithm.node.schedule, why_no_changes)
        self._max_lead = max_lead
        self._why_no_changes, self._check_members = why_no_changes, check_members
        self.numbering = Numbering(node.schedule.num_peers if num_listed is None else num_listed)
        self._check_newcomer = check_newcomer
        self._unconfirmed: list[tuple[Change, int | None]] = []
        """(loss, who told of it) that is not believed here: this peer joins, and some that are left have yet to report
        it; or it believes another, and no majority would be left."""

    # What is known.

    @property
    def is_member(self) -> bool:
        """Whether this peer takes part in the coming round, or the one under way."""
        if self._views is None or self._session.in_round:
            return True
        return self.peer in self._views.membership.members(self._session.round)

    @property
    def is_outsider(self) -> bool:
        """Whether it never was a member, and has not heard yet that it becomes one."""
        return self._views is not None and not self._views.membership.was_ever(self.peer)

    @property
    def has_left(self) -> bool:
        """Whether this peer was a member and has handed over what it had."""
        return not self.is_member and self._session.round > 0

    def is_gone(self, peer: int) -> bool:
        """Whether another peer was a member and left, or is lost."""
        t = self._session.round
        if self._views is None or peer in self._views.membership.members(t):
            return False
        ended = (change for change in self.changes if change.kind is not ChangeKind.JOIN)
        return any(change.subject == peer and change.effective <= t for change in ended)

    def standing(self, peer: int) -> str:
        """Return what a peer is in the coming round, or the one under way: "member", "left", "lost", "joining" or "not
        joined"."""
        if self._views is None or peer in self._views.membership.members(self._session.round):
            return "member"
        if self.is_gone(peer):
            kinds = {change.kind for change in self.changes if change.subject == peer}
            return "lost" if ChangeKind.LOST in kinds else "left"
        return "joining" if self._views.membership.is_coming(peer, self._session.round) else "not joined"

    @property
    def members(self) -> tuple[int, ...] | None:
        """Who takes part in the coming round, or the one under way; None where members cannot change."""
        return None if self._views is None else self._views.membership.members(self._session.round)

    @property
    def changes(self) -> tuple[Change, ...]:
        """All changes of the members that are known, past ones too."""
        return () if self._views is None else self._views.membership.changes

    @property
    def coming_changes(self) -> tuple[Change, ...]:
        """What is known to change after the coming round, or the one under way."""
        return () if self._views is None else self._views.membership.applied_after(self._session.round)

    @property
    def newcomers(self) -> Mapping[int, Newcomer]:
        """Who joined, or is about to, without being in everybody's list."""
        return {} if self._views is None else self._views.membership.newcomers

    @property
    def num_numbers(self) -> int:
        """Below which the numbers are of which others may tell: of a peer that joins, whoever may ever take part, since
        it may hear what somebody said before it hears who that is."""
        if self.is_outsider:
            return self.numbering.stride * MAX_INCARNATIONS
        return self._schedule.num_peers

    @property
    def to_lose(self) -> tuple[int, ...]:
        """Lost peers that the session still counts on, ascending: `Participant.lose` has to be called for them."""
        lost = {change.subject for change in self.changes if change.kind is ChangeKind.LOST}
        return tuple(sorted(lost - self._session.lost))

    def partners(self) -> tuple[set[int], set[int]]:
        """Return (whom this peer hears, who hears it), now and with the members to come as far as they are known."""
        me = self.peer
        if self._views is None:
            return set(self._schedule.all_senders(me)), set(self._schedule.all_receivers(me))
        views, senders, receivers = self._views, set[int](), set[int]()
        now = self._session.round
        for t in (now, *(change.effective for change in self.coming_changes)):
            senders |= set(views.senders_from(t, me))
            receivers |= set(views.receivers_from(t, me))
            # With a sponsor or an heir there is something to exchange even where the graph has no edge.
            others = boundary.partners(views, t - 1, me, self._algorithm.spec) if t > now else set()
            senders, receivers = senders | others, receivers | others
        return senders - self._session.lost, receivers - self._session.lost

    # Announcing.

    def plan(
        self,
        kind: ChangeKind,
        subject: int,
        newcomer: Newcomer | None = None,
        *,
        votes: tuple[bytes, ...] = (),
        ordered: bytes = b"",
    ) -> Change:
        """Return a change that this peer can announce (`learn`): it counts from a round before which every member will
        have heard of it. Raises ConfigError, with the reason, if the members cannot change like that. `newcomer` tells
        who joins, where not everybody lists it. `votes`, `ordered`: what a loss goes by, where members
        declare losses themselves (`node.loss_votes`).

        Whoever is at distance d of this peer can complete its round r + d only with a message that follows the
        announcement, since frames come in order; and nobody is further ahead or behind than `max_lead` rounds. Three
        times that leaves room for the graph with a lost peer missing, and for neighbours that are new to each other;
        with a change under way, `max_lead` is that of the sparser graph.
        """
        if self._views is None:
            key = "algorithm.name" if self._why_no_changes else None
            raise ConfigError(self._why_no_changes or "the members of this run cannot change", key=key)
        t, rounds = self._session.round, self._algorithm.node.rounds
        # Without a lost peer nothing may hold the others together until the graph without it counts; or until the end.
        until = max((each.effective for each in self.coming_changes if each.kind is ChangeKind.LOST), default=0)
        effective = max(t, min(until, rounds)) + 3 * self._longest_lead(self._views) + 3
        for change in self.coming_changes:
            if change.kind is ChangeKind.JOIN and change.subject == subject:
                # A loss before the peer has joined would change nothing.
                effective = max(effective, change.effective + 1)
        # A lost peer is not waited for from when on its loss is known, whether or not a round without it ever comes.
        if effective >= rounds and not (kind is ChangeKind.LOST and self._may_rejoin_now()):
            raise ConfigError(
                f"the run ends after round {rounds - 1}, before everybody could know (round {effective}); "
                "let it end, or stop this peer"
            )
        self._check_members(self._planned_members(self._views.membership, kind, subject))
        # Whoever has heard more of it reports that; and all that did may be lost themselves.
        heard = (self._session.last_heard(subject) or 0) if kind is ChangeKind.LOST else 0
        change = Change(kind, subject, self.peer, effective, heard, newcomer, votes=votes, ordered=ordered)
        if self._by_majority and kind is ChangeKind.LOST:
            if not votes and not ordered:
                raise ConfigError(
                    "with rounds.lost_after_s a loss needs the votes of most members, or an operator's certificate: run"
                    " this where operator.pem and operator.key are"
                )
            if not self._leaves_majority(change):
                raise ConfigError("those that are left would be no majority of the members; an operator has to decide")
        return change

    def _planned_members(self, membership: Membership, kind: ChangeKind, subject: int) -> tuple[int, ...]:
        """Return the members after a change. Raises ConfigError where it makes no sense."""
        now, later = membership.members(self._session.round), membership.coming(self._session.round)[-1]
        planned = members_after(later, kind, subject)
        if kind is ChangeKind.LOST and subject in now and subject not in later:
            planned = later  # It was about to leave.
        is_changing = any(change.subject == subject for change in self.coming_changes)
        # A peer may be lost before it joins, or before it leaves.
        if planned is None or (is_changing and kind is not ChangeKind.LOST):
            state = "about to change already" if subject in {*now, *later} else "no member"
            raise ConfigError(f"peer {subject} is {'a member' if kind is ChangeKind.JOIN else state}")
        if kind is ChangeKind.JOIN:
            if any(change.subject == subject for change in self.changes):
                # Its frames are numbered from 1 again, and old ones may still be on their way.
                raise ConfigError(
                    f"peer {subject} was a member before; whoever left or was lost cannot come back under its number"
                )
            if self.numbering.former(subject) is not None:
                self._check_may_rejoin(subject)
            if (why := self._why_not_again(subject, self._session.round + 1)) is not None:
                raise ConfigError(why)
        if kind is ChangeKind.LEAVE and any(
            change.kind is ChangeKind.JOIN and change.issuer == subject for change in self.coming_changes
        ):
            raise ConfigError(f"peer {subject} sponsors a peer that joins; let it leave after that")
        if kind is ChangeKind.JOIN and self.peer not in later:
            raise ConfigError("this peer is about to leave and sponsors nobody; ask another one")
        if kind is ChangeKind.JOIN and self.peer not in now:
            # It waits in a round that the members have yet to come to, and may never begin.
            raise ConfigError("this peer is about to join itself and sponsors nobody yet; ask another one")
        return planned

    def _check_may_rejoin(self, number: int) -> None:
        """Raise ConfigError unless this peer may sponsor a device that has taken part before under another number."""
        if not self._may_rejoin_now():
            raise ConfigError("some members run a release in which nobody who was lost takes part again")
        device = self.numbering.device(number)
        left = (change.subject for change in self.changes if change.kind is ChangeKind.LEAVE)
        if device in map(self.numbering.device, left):
            raise ConfigError(f"peer {device} has left the run; it cannot come back by itself")

    def _why_not_again(self, number: int, effective: int) -> str | None:
        """Return why a device may not take part under this number from round `effective` on, where it has taken part
        before under another; None where it may. Two incarnations of a device are never members at once."""
        former = self.numbering.former(number)
        if former is None:
            return None
        if self._why_no_rejoin is not None:
            return self._why_no_rejoin
        assert self._views is not None
        if not self._is_lost(former):
            return f"peer {former}, which it was before, is not lost"
        if self._views.membership.is_coming(former, max(0, effective - 1)):
            return f"the loss of peer {former}, which it was before, does not count yet"
        return None

    # Hearing.

    def check_notice(self, change: Change, sender: int) -> None:
        """Raise RemoteProtocolError unless `sender` may tell of a change, and the newcomer in it is who it is said to
        be."""
        if self._views is None:
            raise RemoteProtocolError(f"announced a change of members: {self._why_no_changes}", peer=sender)
        membership, is_join = self._views.membership, change.kind is ChangeKind.JOIN
        if change in membership.changes:
            return
        # Whoever joins has nothing yet to judge by, and hears of its sponsor's own joining among the rest.
        takes_part = membership.was_ever(self.peer)
        if takes_part and not membership.was_ever(sender) and not (is_join and change.subject == sender):
            raise RemoteProtocolError("is no member yet and told of a change of others", peer=sender)
        if is_join and (change.newcomer is None) != (change.subject < self.numbering.num_listed):
            who = "nobody knows" if change.newcomer is None else "everybody lists"
            raise RemoteProtocolError(f"told that peer {change.subject} joins, whom {who}", peer=sender)
        if is_join and not self.numbering.is_possible(change.subject):
            raise RemoteProtocolError(f"told of a change of peer {change.subject}, a number of nobody", peer=sender)
        self._check_change(change, sender)
        if change.newcomer is not None:
            try:
                self._check_newcomer(change.subject, change.newcomer)
            except (ConfigError, SecurityError) as error:
                raise RemoteProtocolError(f"told that peer {change.subject} joins: {error}", peer=sender) from None

    def _check_change(self, change: Change, sender: int) -> None:
        """Raise RemoteProtocolError for a change that no member can have announced, as far as this peer can know."""
        assert self._views is not None
        membership, t, rounds = self._views.membership, self._session.round, self._algorithm.node.rounds
        kind, who, effective = change.kind, change.subject, change.effective
        # A loss may be announced until the last round; others may know of members among whom that takes longer.
        beyond = 6 * self._longest_lead(self._views) + 6 if kind is ChangeKind.LOST else 0
        if rounds and effective >= rounds + beyond:
            raise RemoteProtocolError(f"told of a change from round {effective} of a run of {rounds}", peer=sender)
        if change.heard_round >= effective or (change.heard_round and kind is not ChangeKind.LOST):
            raise RemoteProtocolError(
                f"told that peer {who} was heard in round {change.heard_round} and changes from round {effective}",
                peer=sender,
            )
        if not membership.was_ever(self.peer):
            return  # An outsider does not know the rest yet.
        # Nothing is learned from others about oneself: what this peer announced is on its disk before anybody hears it.
        if change.issuer == self.peer or (who == self.peer and kind is not ChangeKind.JOIN):
            raise RemoteProtocolError(
                f"told this peer of its own {kind.name} from round {effective}, in the name of peer {change.issuer}",
                peer=sender,
            )
        if (kind is ChangeKind.JOIN and who in membership.members(0)) or (
            kind is not ChangeKind.JOIN and not membership.was_ever(who)
        ):
            state = "a member from the start" if kind is ChangeKind.JOIN else "no member"
            raise RemoteProtocolError(f"told of the {kind.name} of peer {who}, which is {state}", peer=sender)
        if kind is ChangeKind.JOIN and (why := self._why_not_again(who, effective)) is not None:
            # A sponsor knows the loss before it announces the join, and tells everybody in this order.
            raise RemoteProtocolError(f"told that peer {who} joins: {why}", peer=sender)
        latest = t + self._notice_rounds(change, sender)
        if self.peer in membership.members(t) and effective <= latest and self._changes_anything(change, latest):
            # By the rule of `plan` every member hears of a change in time.
            how_soon = "past" if effective <= t + 1 else "too soon for all to hear of it"
            raise RemoteProtocolError(
                f"told in round {t} of the {kind.name} of peer {who} from round {effective}, which is {how_soon}",
                peer=sender,
            )

    def check_proof(self, change: Change, sender: int) -> None:
        """Raise RemoteProtocolError unless the issuer of a change said so. A replay does not ask: who was believed once
        is believed, and earlier releases signed nothing."""
        if change in self.changes:
            return
        said = membership_codec.encode(change)
        try:
            self._statements.check(MEMBERS, change.issuer, said[len(membership_codec.MAGIC) :])
        except SecurityError as error:
            raise RemoteProtocolError(
                f"told of the {change.kind.name} of peer {change.subject} in the name of peer {change.issuer}: {error}",
                peer=sender,
            ) from None
        if self._by_majority and change.kind is ChangeKind.LOST and not self.is_outsider:
            try:
                self._check_grounds(change)
            except SecurityError as error:
                raise RemoteProtocolError(f"told of the loss of peer {change.subject}: {error}", peer=sender) from None
        number = _counter(change)
        for other in self.changes if number is not None else ():
            if other.issuer == change.issuer and _counter(other) == number:
                raise RemoteProtocolError(
                    f"told of two changes that peer {change.issuer} signed with the counter {number}: the"
                    f" {change.kind.name} of peer {change.subject} and the {other.kind.name} of peer {other.subject};"
                    f" their proofs show that peer {change.issuer} lies",
                    peer=sender,
                )

    def _changes_anything(self, change: Change, upto: int) -> bool:
        """Return whether a change makes a difference to the members of any round up to another one, or to a lost peer:
        which another report of a known loss does not. Rounds that are past here may lie ahead of a peer that is behind,
        which this peer would tell of it."""
        assert self._views is not None
        membership = self._views.membership
        if change.kind is ChangeKind.LOST:
            loss = (change.kind, change.subject, change.effective)
            return loss not in {(each.kind, each.subject, each.effective) for each in membership.changes}
        after = Membership(membership.members(0), (*membership.changes, change))
        return any(after.members(round_) != membership.members(round_) for round_ in range(change.effective, upto + 1))

    def _notice_rounds(self, change: Change, sender: int) -> int:
        """Return after how many rounds from the coming one, or the one under way, a change may count at the earliest
        that `sender` tells of.

        Its issuer knows a change first. If it leaves less time than the news takes from here to everybody, some would
        believe it, pass it on, and be refused by those who are ahead: the members would split over one lie. Whoever
        passes a change on may tell of it until it counts. So who lies in another's name can still bring that about.
        """
        assert self._views is not None
        if change.issuer != sender:
            return 1
        return 1 + self._views.lead(self._views.membership.members(self._session.round))

    def _is_excess(self, change: Change) -> bool:
        """Whether so much was told already in the name of this issuer about this subject that more is not believed."""
        who = (change.kind, change.subject, change.issuer)
        told = [*self.changes, *(each for each, _ in self._unconfirmed)]
        return change in told or sum((each.kind, each.subject, each.issuer) == who for each in told) >= MOST_VERSIONS

    def learn(self, change: Change, source: int | None = None) -> Learned | None:
        """Take note of a change of the members that was checked, and say whom to tell; `source` told it, None stands
        for this peer's own announcement. Returns None for one that was known, or is not believed (yet)."""
        if self._views is None:
            raise LocalProtocolError(f"a change of members: {self._why_no_changes}")
        membership, t = self._views.membership, self._session.round
        if change in membership.changes or (source is not None and self._is_excess(change)):
            return None
        believed = [(change, source)]
        is_doubtful = self._is_joining and not self._is_lost(change.subject)
        if self._by_majority and change.kind is ChangeKind.LOST and source is not None and is_doubtful:
            self._unconfirmed += believed
            believed = self._confirmed(membership)
        elif self._by_majority and change.kind is ChangeKind.LOST and self.peer in membership.members(t):
            if not self._leaves_majority(change):
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

    @property
    def _is_joining(self) -> bool:
        """Whether this peer waits for the model that it joins with: in a round that the others have yet to end."""
        assert self._views is not None
        return self._session.in_round and self.peer not in self._views.membership.members(self._session.round)

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
        if any(change.ordered for change in known):
            return True
        quorum = Quorum(membership, reports[0].subject, [decode_vote(vote) for each in known for vote in each.votes])
        left = quorum.left - lost
        leaving = {change.subject for change in membership.changes if change.kind is ChangeKind.LEAVE}
        silent = left - leaving - {self.peer} - {change.issuer for change in known}
        # After an order, those that are left may be any part of the members.
        is_ordered = any(change.ordered for change in (*losses, *(change for change, _ in self._unconfirmed)))
        return not silent and (quorum.is_majority(left) or (bool(left) and is_ordered))

    def _take_note(self, change: Change, source: int | None) -> Learned:
        """Take note of a change that is believed."""
        assert self._views is not None
        membership, t = self._views.membership, self._session.round
        takes_part = self.peer in membership.members(t)
        joins = change.kind is ChangeKind.JOIN and change.subject == self.peer and not takes_part
        # Before the change is known: the difference it makes decides whom to tell.
        told_before = self._passes_on_to()
        membership.add(change)
        # A second sponsor that knew nothing of the first counts only where it is earlier.
        joins = joins and change in membership.changes_at(change.effective)
        # Before anything is heard of the new neighbours: they may be further ahead than the old graph lets anybody be.
        self._allow_for_changes(self._views)
        return Learned(
            notices=tuple(self._notices(membership, change, source, told_before, joins=joins, takes_part=takes_part)),
            # What others say of a loss that is known changes no links.
            news=() if change.subject in self._session.lost else (change,),
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
        t = self._session.round
        passes_on_to, hears_own = (hearers - {change.subject} for hearers in (self._passes_on_to(), self.hearers()))
        own_join = (ChangeKind.JOIN, self.peer)
        # Where several may be lost at once, even who told of one may know nothing of another. (Journals of other runs
        # were written by releases that told it nothing.)
        untold = {source} if not self._by_majority or source in told_before else set[int | None]()
        for other in sorted((hears_own if source is None else passes_on_to) - untold):
            # Who has only now become a neighbour to be was told nothing so far.
            coming = membership.changes if other in passes_on_to - told_before else ()
            told = {change, *(each for each in coming if each.effective > t and each.subject != other)}
            if other == source:
                told.discard(change)
            if self._by_majority:
                # Whoever said so knows it; and would not hear it from others, where it lies and has kept nothing of it.
                told = {each for each in told if each.issuer != other}
            # A peer's join before its loss, and the own join first: a peer that is no member yet is not believed.
            in_order = sorted(told, key=lambda each: ((each.kind, each.subject) != own_join, each.order))
            yield from ((other, each) for each in in_order)
        reports = self._own_reports(change.effective if joins else t) if membership.was_ever(self.peer) else []
        for join in membership.applied_after(t) if reports and self._by_majority else ():
            if (join.kind, join.subject) == own_join:
                # Nobody is believed who is not known yet; and not all of them need have heard that this peer joins.
                yield from ((other, join) for other in sorted(hears_own - passes_on_to - {join.issuer}))
        for own in reports:
            membership.add(own)
            yield from ((other, own) for other in sorted(hears_own - {own.subject}))
        is_orphan = self._by_majority and takes_part and change.issuer in self._session.lost
        if change.kind is ChangeKind.JOIN and (change.issuer == self.peer or is_orphan):
            yield from self._introduction(change)
        if change.kind is ChangeKind.LOST and takes_part:
            # Its sponsor may be lost before the new peer has heard a word of it.
            for join in membership.applied_after(t):
                if join.kind is ChangeKind.JOIN and join.issuer == change.subject and join.subject != self.peer:
                    yield from self._introduction(join)

    def hearers(self) -> set[int]:
        """Return whom this peer tells of what it says itself: those to whom it passes changes on; and where members
        declare losses themselves, after one every member that is not lost here.

        Others may have declared another peer lost meanwhile. If the two stood between them, neither graph has an edge
        by which one part would hear of what the other believes, and each would wait for the other's reports.
        """
        hearers = self._passes_on_to()
        if not self._by_majority or not self.is_member or not self._awaits_loss or self._views is None:
            return hearers
        return hearers | ({*self._views.membership.members(self._session.round)} - self._session.lost - {self.peer})

    def _passes_on_to(self) -> set[int]:
        """Return to whom this peer passes changes on: its partners; and after a loss also those that are about to
        leave, which for their part tell every member.

        The graph without the lost peer, along which all others hear of the loss, has no place for a peer that leaves
        before, and the lost one may have been all that it was connected by.
        """
        senders, receivers = self.partners()
        hearers = senders | receivers
        if self._views is None or not self._awaits_loss:
            return hearers
        t, membership = self._session.round, self._views.membership
        # They may still be in rounds that are over here.
        recent = membership.applied_after(t - self._longest_lead(self._views))
        leaving = {change.subject for change in recent if change.kind is ChangeKind.LEAVE}
        others = set(membership.members(t)) if self.peer in leaving else leaving
        return hearers | (others - self._session.lost - {self.peer})

    @property
    def _awaits_loss(self) -> bool:
        """Whether a loss is known that counts from a later round."""
        return any(change.kind is ChangeKind.LOST for change in self.coming_changes)

    def _introduction(self, join: Change) -> Iterable[tuple[int, Change]]:
        """Yield what a peer that joins is told, which knows of nothing: of itself last, since with that it begins."""
        history = [each for each in self.changes if each != join]
        return ((join.subject, each) for each in (*history, join))

    def _own_reports(self, t: int) -> list[Change]:
        """Return what this peer has to say itself of peers that are lost, and that somebody in round t or a later one
        may still need, for all to know what those had: nothing where it has said so."""
        assert self._views is not None
        membership = self._views.membership
        # A peer that has left is needed by those who are behind.
        since = max(0, t - 2 * self._longest_lead(self._views))
        losses = {change.subject: change for change in reversed(self.changes) if change.kind is ChangeKind.LOST}
        said = {
            change.subject for change in self.changes if (change.kind, change.issuer) == (ChangeKind.LOST, self.peer)
        }
        return [
            self.signed(replace(loss, issuer=self.peer, heard_round=self._session.last_heard(subject) or 0, told=b""))
            for subject, loss in sorted(losses.items())
            if membership.is_coming(subject, since) and subject not in said
        ]

    def _check_grounds(self, change: Change) -> None:
        """Raise SecurityError unless a majority of the members, or an operator, has decided a loss just now."""
        assert self._views is not None
        if not change.ordered and self._is_known_loss(change):
            return
        t, lead = self._session.round, self._longest_lead(self._views)
        if len(change.votes) > self._views.num_peers:
            raise SecurityError(f"it comes with {len(change.votes)} votes")
        votes = {vote.voter: vote for vote in map(decode_vote, change.votes)}
        # A peer that joins waits in the round from which it counts, which the others have yet to come to.
        joins = self._views.membership.applied_after(t - lead - 1)
        is_new = any((each.kind, each.subject) == (ChangeKind.JOIN, self.peer) for each in joins)
        before = t - 3 * lead - 3 if is_new else t
        for vote in votes.values() if not self._is_joining else ():
            # The issuer may be as far from here as the voters from it.
            if not is_current(vote.round, t, 2 * lead) and not is_current(vote.round, before, 2 * lead):
                raise SecurityError(f"the vote of peer {vote.voter} is of a round long ago")
        self._check_decided(change, votes)

    def _check_decided(self, change: Change, votes: Mapping[int, LossVote]) -> None:
        """Raise SecurityError unless an operator or these votes have decided a loss, whenever that was."""
        assert self._views is not None
        if change.ordered:
            incarnation = self.numbering.incarnation(change.subject)
            if ordered(change.ordered) != (self._name_of(change.subject), incarnation):
                raise SecurityError("the operator's order is about another peer")
            self._statements.check_order(ORDER, change.ordered)
            return
        for vote in votes.values():
            if vote.subject != change.subject:
                raise SecurityError(f"the vote of peer {vote.voter} is about another peer")
            self._statements.check(LOST, vote.voter, vote.said)
        membership, t = self._views.membership, self._session.round
        electorates = {membership.members(vote.round) for vote in votes.values()}
        for members in electorates or {membership.members(t)}:
            count = len({*members} & votes.keys() - {change.subject})
            if 2 * count <= len(members):
                raise SecurityError(f"{count} of {len(members)} members have voted for it, and most have to")

    def proofs_of_loss(self) -> dict[int, bytes]:
        """Return lost peer → a frame that proves to it that it is lost: where members declare losses themselves, that a
        majority or an operator has decided so."""
        losses = [change for change in self.changes if change.kind is ChangeKind.LOST]
        if self._by_majority:
            losses = [change for change in losses if change.votes or change.ordered]
        return {change.subject: membership_codec.encode(change) for change in losses}

    def check_own_loss(self, frame: bytes) -> None:
        """Raise SecurityError or RemoteProtocolError unless a frame from elsewhere proves that this peer was declared
        lost."""
        assert self._views is not None
        num_numbers = self.numbering.stride * MAX_INCARNATIONS
        change = membership_codec.decode(frame, num_numbers, sender=self.peer)
        if (change.kind, change.subject) != (ChangeKind.LOST, self.peer) or change.issuer == self.peer:
            raise SecurityError("it is about another peer")
        self._statements.check(MEMBERS, change.issuer, frame[len(membership_codec.MAGIC) :])
        if self._by_majority:
            self._check_decided(change, {vote.voter: vote for vote in map(decode_vote, change.votes)})

    def _is_lost(self, peer: int) -> bool:
        """Whether this peer believes any loss of another."""
        return any((change.kind, change.subject) == (ChangeKind.LOST, peer) for change in self.changes)

    def _is_known_loss(self, change: Change) -> bool:
        loss = (ChangeKind.LOST, change.subject, change.effective)
        return loss in {(each.kind, each.subject, each.effective) for each in self.changes}

    def _leaves_majority(self, change: Change) -> bool:
        """Whether this peer may believe a loss: see `node.loss_votes`. A replay gives the same answer."""
        assert self._views is not None
        # Of a peer that is lost already, all reports count, whatever they go by: they are waited for.
        if change.ordered or not change.votes or self._is_lost(change.subject):
            return True
        votes = [decode_vote(each) for each in change.votes]
        return Quorum(self._views.membership, change.subject, votes).has_decided

    def signed(self, change: Change) -> Change:
        """Return a change that this peer announces or reports, with its proof where the run has certificates."""
        frame = membership_codec.encode(change)
        told = self.own_words.signed(frame)
        return change if told == frame else replace(change, told=told)

    @property
    def longest_lead(self) -> int:
        """How many rounds a peer can be ahead of another, with the members of now and of later."""
        return self._max_lead if self._views is None else self._longest_lead(self._views)

    def loss_votes(self, statements: Statements, *, after_s: float) -> LossVotes:
        """Return the votes of this peer on who is lost. Raises LocalProtocolError where nobody can be."""
        if self._views is None or not self._by_majority:
            raise LocalProtocolError(f"a loss: {self._why_no_changes or 'members do not declare losses here'}")
        return LossVotes(self.peer, self._views.membership, statements, after_s=after_s)

    def _longest_lead(self, views: ViewSchedule) -> int:
        """Return how many rounds a peer can be ahead of another, with the members of now and of later."""
        coming = views.membership.coming(self._session.round)
        return max(self._max_lead, *(views.lead(members) for members in coming))

    def _allow_for_changes(self, views: ViewSchedule) -> None:
        """Hear neighbours as far ahead as they can be while members change: notices travel with the frames."""
        self._session.max_lead = 4 * self._longest_lead(views) + 4

    # State.

    def state(self) -> list[list[Any]]:
        """Return all changes as JSON values."""
        return [] if self._views is None else self._views.membership.state()

    def restore(self, changes: Sequence[Sequence[Any]]) -> None:
        """Take back what `state` returned; the session is to be restored between this and `restore_edges`. Raises
        StateError where members cannot change any more, ValueError or TypeError if it cannot be such a state."""
        if self._views is not None:
            self._views.membership.restore(changes)
        elif changes:
            raise StateError(f"the members changed in the run of this checkpoint: {self._why_no_changes}")

    def restore_edges(self) -> None:
        """Go back to the edges of the round that the session is in."""
        if self._views is None or self._views.membership.is_settled:
            return
        self._allow_for_changes(self._views)
        self._views.enter(self._session.round)
        replicas = self._algorithm.replicas
        if replicas is not None:
            senders, receivers = self._views.all_senders(self.peer), self._views.all_receivers(self.peer)
            replicas.change_edges(senders, receivers, self._session.round)


def _counter(change: Change) -> int | None:
    return counter_of(change.told[len(membership_codec.MAGIC) :]) if change.told else None


def changing_views(schedule: object, why_no_changes: str | None) -> ViewSchedule | None:
    """Return a schedule as the one that follows the members, where these can change."""
    return schedule if isinstance(schedule, ViewSchedule) and why_no_changes is None else None
