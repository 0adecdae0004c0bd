"""Checks of announced changes of the members: an honest peer announces none that is refused here.

These checks change nothing. `check_notice` uses only what all members know, so that a replay gives the same answer;
proofs are checked once, when a notice comes.
"""

from __future__ import annotations

from collections.abc import Iterable

from peer.errors import ConfigError, RemoteProtocolError, SecurityError
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.gossip.views import ViewSchedule
from peer.node import membership_codec
from peer.node.loss_votes import decode_vote, is_current
from peer.node.membership import PeerMembership
from peer.node.statements import MEMBERS, counter_of


def check_notice(known: PeerMembership, change: Change, sender: int) -> None:
    """Raise RemoteProtocolError unless `sender` may tell of a change and the identity of its newcomer is right."""
    if known.views is None:
        raise RemoteProtocolError(f"announced a change of members: {known.rules.why_no_changes}", peer=sender)
    membership, is_join = known.views.membership, change.kind is ChangeKind.JOIN
    if change in membership.changes:
        return
    # A joining peer has nothing yet to judge by, and hears of its sponsor's own joining among the rest.
    takes_part = membership.was_ever(known.peer)
    if takes_part and not membership.was_ever(sender) and not (is_join and change.subject == sender):
        raise RemoteProtocolError("is no member yet and told of a change of others", peer=sender)
    if is_join and (change.newcomer is None) != (change.subject < known.numbering.num_listed):
        who = "nobody knows" if change.newcomer is None else "everybody lists"
        raise RemoteProtocolError(f"told that peer {change.subject} joins, whom {who}", peer=sender)
    if is_join and not known.numbering.is_possible(change.subject):
        raise RemoteProtocolError(f"told of a change of peer {change.subject}, a number of nobody", peer=sender)
    _check_change(known, known.views, change, sender)
    if change.newcomer is not None:
        try:
            known.rules.check_newcomer(change.subject, change.newcomer)
        except (ConfigError, SecurityError) as error:
            raise RemoteProtocolError(f"told that peer {change.subject} joins: {error}", peer=sender) from None


def _check_change(known: PeerMembership, views: ViewSchedule, change: Change, sender: int) -> None:
    """Raise RemoteProtocolError for a change that no member can have announced, as far as this peer can know."""
    membership, t, rounds = views.membership, known.session.round, known.session.algorithm.node.rounds
    kind, who, effective = change.kind, change.subject, change.effective
    # A loss may be announced until the last round; others may know of members among whom that takes longer.
    beyond = 6 * known.longest_lead + 6 if kind is ChangeKind.LOST else 0
    if rounds and effective >= rounds + beyond:
        raise RemoteProtocolError(f"told of a change from round {effective} of a run of {rounds}", peer=sender)
    if change.heard_round >= effective or (change.heard_round and kind is not ChangeKind.LOST):
        raise RemoteProtocolError(
            f"told that peer {who} was heard in round {change.heard_round} and changes from round {effective}",
            peer=sender,
        )
    if not membership.was_ever(known.peer):
        return  # An outsider does not know the rest yet.
    # Others have no news about this peer: its announcements are on its disk before anybody hears them.
    if change.issuer == known.peer or (who == known.peer and kind is not ChangeKind.JOIN):
        raise RemoteProtocolError(
            f"told this peer of its own {kind.name} from round {effective}, in the name of peer {change.issuer}",
            peer=sender,
        )
    if (kind is ChangeKind.JOIN and who in membership.members(0)) or (
        kind is not ChangeKind.JOIN and not membership.was_ever(who)
    ):
        state = "a member from the start" if kind is ChangeKind.JOIN else "no member"
        raise RemoteProtocolError(f"told of the {kind.name} of peer {who}, which is {state}", peer=sender)
    if kind is ChangeKind.JOIN and (why := known.why_not_again(who, effective)) is not None:
        # A sponsor knows the loss before it announces the join, and tells everybody in this order.
        raise RemoteProtocolError(f"told that peer {who} joins: {why}", peer=sender)
    latest = t + _notice_rounds(t, views, change, sender)
    if known.peer in membership.members(t) and effective <= latest and _changes_anything(membership, change, latest):
        # By the rule of `plan_change` every member hears of a change in time.
        how_soon = "past" if effective <= t + 1 else "too soon for all to hear of it"
        raise RemoteProtocolError(
            f"told in round {t} of the {kind.name} of peer {who} from round {effective}, which is {how_soon}",
            peer=sender,
        )


def _notice_rounds(t: int, views: ViewSchedule, change: Change, sender: int) -> int:
    """Return the fewest rounds from t, the coming one or the one under way, after which a change that `sender` tells of
    may count.

    The issuer knows a change first. If it leaves less time than the news takes from here to everybody, some would
    believe it, pass it on, and be refused by peers that are ahead: the members would split over one lie. A peer that
    passes a change on may tell of it until it counts. Where nothing is signed, a lie in another's name can therefore
    still split them.
    """
    if change.issuer != sender:
        return 1
    return 1 + views.lead(views.membership.members(t))


def _changes_anything(membership: Membership, change: Change, upto: int) -> bool:
    """Return whether a change alters the members of any round up to `upto`, or is the first report of a loss. Rounds
    that are past here may lie ahead of a slower peer, which this peer would tell of it."""
    if change.kind is ChangeKind.LOST:
        return not _is_known_loss(membership.changes, change)
    after = Membership(membership.members(0), (*membership.changes, change))
    return any(after.members(round_) != membership.members(round_) for round_ in range(change.effective, upto + 1))


def check_proof(known: PeerMembership, change: Change, sender: int) -> None:
    """Raise RemoteProtocolError unless the issuer of a change announced it. A replay does not check: a change believed
    once stays so, and earlier releases signed nothing."""
    if change in known.changes:
        return
    if change.kind is ChangeKind.JOIN and change.subject == sender:
        _check_sponsor(known, change)
    said = membership_codec.encode(change)
    try:
        known.statements.check(MEMBERS, change.issuer, said[len(membership_codec.MAGIC) :])
    except SecurityError as error:
        raise RemoteProtocolError(
            f"told of the {change.kind.name} of peer {change.subject} in the name of peer {change.issuer}: {error}",
            peer=sender,
        ) from None
    if change.kind is ChangeKind.LOST and (_needs_grounds(known) or (change.equivocation and not known.is_outsider)):
        try:
            _check_grounds(known, change)
        except SecurityError as error:
            raise RemoteProtocolError(f"told of the loss of peer {change.subject}: {error}", peer=sender) from None
    number = _counter(change)
    for other in known.changes if number is not None else ():
        if other.issuer == change.issuer and _counter(other) == number:
            raise RemoteProtocolError(
                f"told of two changes that peer {change.issuer} signed with the counter {number}: the"
                f" {change.kind.name} of peer {change.subject} and the {other.kind.name} of peer {other.subject};"
                f" their proofs show that peer {change.issuer} lies",
                peer=sender,
            )


def _check_sponsor(known: PeerMembership, join: Change) -> None:
    """Raise RemoteProtocolError for a join that only the new peer tells of, after the report on its lost sponsor.

    Members tell each other what they know of a lost sponsor's words before they report its loss, and nobody goes on
    before all have reported. What the new peer tells later may be in time for some of them and too late for others.
    """
    assert known.views is not None
    membership = known.views.membership
    has_reported = known.is_lost(join.issuer) and known.peer in membership.members(known.session.round)
    if has_reported and join.subject not in membership.members(join.effective):
        raise RemoteProtocolError(f"told late that it joins by peer {join.issuer}, which is lost", peer=join.subject)


def _needs_grounds(known: PeerMembership) -> bool:
    """Whether a loss now needs more than the word of one member. An outsider has only its sponsor to believe; and where
    nothing is signed, an order would be a mere word, too."""
    if known.is_outsider or not (known.is_signed or known.rules.by_majority):
        return False
    return known.rules.by_majority or not known.rules.word_suffices()


def _check_grounds(known: PeerMembership, change: Change) -> None:
    """Raise SecurityError unless a majority of the members, or an operator, has decided a loss just now."""
    assert known.views is not None
    if not change.is_certain and _is_known_loss(known.changes, change):
        return
    t, lead = known.session.round, known.longest_lead
    if not change.is_certain and not known.is_joining:
        # A joining peer waits at the round from which it counts, which the others have yet to reach.
        joins = known.views.membership.applied_after(t - lead - 1)
        is_new = any((each.kind, each.subject) == (ChangeKind.JOIN, known.peer) for each in joins)
        before = t - 3 * lead - 3 if is_new else t
        for vote in map(decode_vote, change.votes):
            # The issuer may be as far from here as the voters from it.
            if not is_current(vote.round, t, 2 * lead) and not is_current(vote.round, before, 2 * lead):
                raise SecurityError(f"the vote of peer {vote.voter} is of a round long ago")
    known.grounds.check(change)


def check_own_loss(known: PeerMembership, frame: bytes) -> None:
    """Raise SecurityError or RemoteProtocolError unless a frame from elsewhere proves that this peer was declared
    lost."""
    change = known.grounds.check_frame(frame, known.peer)
    if not change.is_certain and any(
        decode_vote(vote).round + 6 * known.longest_lead + 6 < known.session.round for vote in change.votes
    ):
        # Without the others it could not have come this far: it was back, and those votes had no effect.
        raise SecurityError("this peer has gone on with the others since those votes")


def _is_known_loss(changes: Iterable[Change], loss: Change) -> bool:
    what = (ChangeKind.LOST, loss.subject, loss.effective)
    return what in {(each.kind, each.subject, each.effective) for each in changes}


def _counter(change: Change) -> int | None:
    return counter_of(change.told[len(membership_codec.MAGIC) :]) if change.told else None
