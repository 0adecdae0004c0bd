"""Changes of the members that a peer may announce, and the rounds from which they count."""

from __future__ import annotations

from typing import Unpack

from peer.errors import ConfigError, SecurityError
from peer.gossip.membership import Change, ChangeKind, Grounds, Membership, Newcomer, members_after
from peer.node.membership import PeerMembership


def plan_change(
    known: PeerMembership,
    kind: ChangeKind,
    subject: int,
    newcomer: Newcomer | None = None,
    **grounds: Unpack[Grounds],
) -> Change:
    """Return a change that this peer can announce: it counts from a round before which every member will have heard of
    it. Raises ConfigError, with the reason, if the members cannot change like that. `newcomer`: identity of a joining
    peer that not everybody lists. `grounds` of a loss: see `node.loss_grounds`.

    A peer at distance d of this one can complete its round r + d only with a message that follows the announcement,
    since frames come in order; and nobody is further ahead or behind than `max_lead` rounds. Three times that leaves
    room for the graph without a lost peer, and for neighbours that are new to each other; with a change under way,
    `max_lead` is that of the sparser graph.
    """
    if known.views is None:
        key = "algorithm.name" if known.rules.why_no_changes else None
        raise ConfigError(known.rules.why_no_changes or "the members of this run cannot change", key=key)
    t, rounds = known.session.round, known.session.algorithm.node.rounds
    # Without a lost peer nothing may hold the others together until the graph without it counts; or until the end.
    until = max((each.effective for each in known.coming_changes if each.kind is ChangeKind.LOST), default=0)
    effective = max(t, min(until, rounds)) + 3 * known.longest_lead + 3
    for change in known.coming_changes:
        if change.kind is ChangeKind.JOIN and change.subject == subject:
            # A loss before the peer has joined would change nothing.
            effective = max(effective, change.effective + 1)
    # A lost peer is not waited for once its loss is known, whether or not a round without it ever comes.
    if effective >= rounds and kind is not ChangeKind.LOST:
        raise ConfigError(
            f"the run ends after round {rounds - 1}, before everybody could know (round {effective}); "
            "let it end, or stop this peer"
        )
    known.rules.check_members(_planned_members(known, known.views.membership, kind, subject))
    # Peers that have heard more of it report that; and all that did may be lost themselves.
    heard = (known.session.last_heard(subject) or 0) if kind is ChangeKind.LOST else 0
    change = Change(kind, subject, known.peer, effective, heard, newcomer, **grounds)
    if kind is ChangeKind.LOST and (known.is_signed or known.rules.by_majority):
        _check_loss(known, change)
    return change


def _check_loss(known: PeerMembership, change: Change) -> None:
    """Raise ConfigError unless all members will believe a loss that this peer is to announce."""
    if not change.has_grounds:
        votes = "the votes of most members, or " * known.rules.by_majority
        raise ConfigError(
            f"a loss needs {votes}the order of an operator: run `sotto remove` where operator.pem and operator.key are,"
            " since no member believes it by the word of another"
        )
    try:
        known.grounds.check(change)
    except SecurityError as error:
        raise ConfigError(f"no member would believe this loss: {error}") from None
    if not known.leaves_majority(change):
        raise ConfigError("those that are left would be no majority of the members; an operator has to decide")


def _planned_members(known: PeerMembership, membership: Membership, kind: ChangeKind, subject: int) -> tuple[int, ...]:
    """Return the members after a change. Raises ConfigError if it makes no sense."""
    now, later = membership.members(known.session.round), membership.coming(known.session.round)[-1]
    planned = members_after(later, kind, subject)
    if kind is ChangeKind.LOST and subject in now and subject not in later:
        planned = later  # It was about to leave.
    is_changing = any(change.subject == subject for change in known.coming_changes)
    # A peer may be lost before it joins, or before it leaves.
    if planned is None or (is_changing and kind is not ChangeKind.LOST):
        state = "about to change already" if subject in {*now, *later} else "no member"
        raise ConfigError(f"peer {subject} is {'a member' if kind is ChangeKind.JOIN else state}")
    if kind is ChangeKind.JOIN:
        if any(change.subject == subject for change in known.changes):
            # Its frames are numbered from 1 again, and old ones may still be on their way.
            raise ConfigError(
                f"peer {subject} was a member before; whoever left or was lost cannot come back under its number"
            )
        if known.numbering.former(subject) is not None:
            _check_has_not_left(known, subject)
        if (why := known.why_not_again(subject, known.session.round + 1)) is not None:
            raise ConfigError(why)
    if kind is ChangeKind.LEAVE and any(
        change.kind is ChangeKind.JOIN and change.issuer == subject for change in known.coming_changes
    ):
        raise ConfigError(f"peer {subject} sponsors a peer that joins; let it leave after that")
    if kind is ChangeKind.JOIN and known.peer not in later:
        raise ConfigError("this peer is about to leave and sponsors nobody; ask another one")
    if kind is ChangeKind.JOIN and known.peer not in now:
        # It waits in a round that the members have yet to reach, and may never begin.
        raise ConfigError("this peer is about to join itself and sponsors nobody yet; ask another one")
    return planned


def _check_has_not_left(known: PeerMembership, number: int) -> None:
    """Raise ConfigError if a device that has taken part before under another number has left the run."""
    device = known.numbering.device(number)
    left = (change.subject for change in known.changes if change.kind is ChangeKind.LEAVE)
    if device in map(known.numbering.device, left):
        raise ConfigError(f"peer {device} has left the run; it cannot come back by itself")
