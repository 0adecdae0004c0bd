"""Losses that no person declares: members vote on peers that they cannot reach, and a strict majority decides.

Two parts of a divided cluster must never both go on as the whole. A member believes a loss only while the members left
are a strict majority of all, and nobody goes on before all that are left have said that they believe it
(`gossip.lost_peers`). Two majorities have a member in common, which would have to believe that both parts are lost. Its
beliefs are in its journal. A smaller part declares nobody lost, and waits.

The members that count are those of the round in which the votes were given: all that hear of a loss agree on them,
since every change is known long before its round. A vote is valid while members cannot have gone on from that round by
more than they can be apart: once a peer is back, and rounds go on, it is void.

The time is an argument, and notes to be sent are returned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from peer.errors import RemoteProtocolError, SecurityError
from peer.gossip.membership import ChangeKind, Membership
from peer.node.statements import MAX_PROOF_BYTES, Statements, opened
from peer.proto.sottovoce.v1 import membership_pb2 as pb
from peer.rate_limits import Allowances

LOST = "lost"
"""Topic of votes, in notes and signatures."""
ORDER = "order"
"""Topic of operators' signed orders (`net.security.orders`)."""
TELL_EVERY_S = 5.0
"""Seconds after which votes are told again: a note may be lost."""
_NEWS = {"rate": 0.5, "burst": 8.0}
"""Votes of one member on the loss of another that are checked and passed on, per second. Others are told again."""
_MOST_NAME = 256


@dataclass(frozen=True)
class LossVote:
    """One member's word that it cannot reach another."""

    voter: int
    subject: int
    round: int
    said: bytes = field(default=b"", compare=False, repr=False)
    """The vote as sent to others, with the proof of the voter."""


def decode_vote(said: bytes) -> LossVote:
    """Return a decoded vote, whose voter is yet to be checked. Raises SecurityError for other bytes."""
    message = opened(pb.LossVote, said, "a vote")
    if len(said) > MAX_PROOF_BYTES or message.round >= 1 << 62:
        raise SecurityError("a vote makes no sense")
    return LossVote(message.voter, message.subject, message.round, said)


def ordered(order: bytes) -> tuple[str, int]:
    """Return the subject of an order: its name and its incarnation. Raises SecurityError for other bytes."""
    message = opened(pb.LossOrder, order, "an order")
    if not 0 < len(message.name) <= _MOST_NAME:
        raise SecurityError("an order names nobody")
    return message.name, message.incarnation


def is_current(round_: int, t: int, lead: int) -> bool:
    """Return whether a vote of a round counts for a member in round t, where members can be `lead` rounds apart."""
    return abs(round_ - t) <= 2 * lead


class Quorum:
    """Whether a loss is decided, and whether the peers left may go on, which all members compute alike. A peer asks
    before it declares a loss, believes one, or accepts its own, so that none refuses a loss that another announces."""

    def __init__(self, membership: Membership, subject: int, votes: Collection[LossVote]) -> None:
        """`votes` on the loss of `subject`, at least one."""
        first = min(vote.round for vote in votes)
        # Where the members changed in between, a majority of those before and of those after has to agree.
        self._electorates = {membership.members(vote.round) for vote in votes}
        losses = (change for change in membership.changes if change.kind is ChangeKind.LOST)
        lost = {change.subject for change in losses if change.effective > first}
        self.left = {peer for members in self._electorates for peer in members} - lost - {subject}
        """The remaining members, of all that may vote."""
        self.voters = {vote.voter for vote in votes} - {subject}
        """Peers that vote for the loss. The subject's own vote does not count: others must be unable to reach it."""

    def is_majority(self, peers: Collection[int]) -> bool:
        """Return whether these peers are a strict majority of the members."""
        return all(2 * len({*members}.intersection(peers)) > len(members) for members in self._electorates)

    @property
    def has_decided(self) -> bool:
        """Whether a strict majority of the members has voted for the loss. All then know that it is no lie, whatever
        other losses they believe, and in any order."""
        return self.is_majority(self.voters)

    @property
    def may_go_on(self) -> bool:
        """Whether the peers left are a strict majority: then the loss is believed."""
        return self.is_majority(self.left)


class LossVotes:
    """Votes that one peer has given and heard, on peers that cannot be reached."""

    def __init__(self, peer: int, membership: Membership, statements: Statements, *, after_s: float) -> None:
        """`after_s`: seconds that a peer has to be away."""
        self._peer, self._membership, self._statements = peer, membership, statements
        self._after_s = after_s
        self._known: dict[tuple[int, int], LossVote] = {}
        """(subject, voter) → its newest vote."""
        self._on_themselves: dict[int, LossVote] = {}
        """Voter → its newest vote for its own loss: each is an offence once."""
        self._looked_at, self._now = Allowances(**_NEWS), 0.0
        self._told_at = float("-inf")
        self._decided_at: dict[int, float] = {}

    def look(self, t: int, lead: int, away_s: Mapping[int, float], now: float) -> list[bytes]:
        """Vote for the loss of peers that are away for long; return the notes to tell all neighbours, if it is time to.
        `t`: the round under way; `lead`: rounds that members can be apart; `away_s`: peer → seconds since it could be
        reached."""
        members, is_news, self._now = self._membership.members(t), False, now
        self._known = {key: vote for key, vote in self._known.items() if self._is_good(vote, t, lead)}
        for subject, seconds in sorted(away_s.items()):
            own = self._known.get((subject, self._peer))
            if seconds <= self._after_s:
                if own is not None:
                    del self._known[subject, self._peer]  # It is back.
            elif subject in members and (own is None or own.round < t - lead) and self._may_vote(subject, t):
                self._vote(subject, t)
                is_news = True
        if not self._known or (not is_news and now < self._told_at + TELL_EVERY_S):
            return []
        self._told_at = now
        return [vote.said for vote in self._known.values()]

    def hear(self, said: bytes, t: int, lead: int) -> bool:
        """Take a vote that a neighbour tells; return whether it is news, to be passed on. Raises RemoteProtocolError
        for one that no honest neighbour tells. A peer named in the error has signed what no honest peer says; the
        neighbour may have passed it on in good faith, as releases before 0.3 do."""
        try:
            vote = decode_vote(said)
            is_on_itself = vote.voter == vote.subject
            known = self._on_themselves.get(vote.voter) if is_on_itself else self._known.get((vote.subject, vote.voter))
            if (
                vote.voter == self._peer
                or vote.subject == self._peer
                or not self._is_good(vote, t, lead)
                or (known is not None and known.round >= vote.round)
            ):
                return False
            about = vote.voter, vote.subject
            if not self._looked_at.spend(about, self._now):
                return False
            try:
                is_proven = self._statements.check(LOST, vote.voter, said)
            except SecurityError:
                self._looked_at.give_back(about)  # Who is named has not said it.
                raise
        except SecurityError as error:
            raise RemoteProtocolError(f"told of a vote: {error}") from None
        if is_on_itself:
            if is_proven:
                self._on_themselves[vote.voter] = vote
                raise RemoteProtocolError("voted for its own loss", peer=vote.voter)
            return False
        self._known[vote.subject, vote.voter] = vote
        return True

    @property
    def suspects(self) -> set[int]:
        """Peers that somebody cannot reach."""
        return {subject for subject, _ in self._known}

    @property
    def own(self) -> set[int]:
        """Peers for whose loss this one votes."""
        return {subject for subject, voter in self._known if voter == self._peer}

    def count(self, subject: int) -> tuple[int, int]:
        """Return (members that vote for the loss of a peer, members)."""
        votes = [vote for (about, _), vote in self._known.items() if about == subject]
        return len(votes), max((len(self._membership.members(vote.round)) for vote in votes), default=0)

    def decided(self, now: float) -> list[tuple[int, tuple[bytes, ...]]]:
        """Return (lost peer, votes) of the losses that a majority has decided, this peer among it. The voters declare
        them in turn, so that not all do at once, and try again after a while."""
        found = []
        for subject in sorted(self.suspects):
            votes = [vote for (about, _), vote in self._known.items() if about == subject]
            quorum = Quorum(self._membership, subject, votes)
            lost = (ChangeKind.LOST, subject)
            is_declared = any((change.kind, change.subject) == lost for change in self._membership.changes)
            if is_declared or self._peer not in quorum.voters or not (quorum.has_decided and quorum.may_go_on):
                self._decided_at.pop(subject, None)
                continue
            began = self._decided_at.setdefault(subject, now)
            place = sorted(quorum.voters).index(self._peer)
            if now >= began + place * self._after_s / 4:
                found.append((subject, tuple(vote.said for vote in votes if vote.voter in quorum.voters)))
                self._decided_at[subject] = now + self._after_s
        return found

    def _is_good(self, vote: LossVote, t: int, lead: int) -> bool:
        """Whether a vote counts; any other is void."""
        members = self._membership.members(vote.round)
        return is_current(vote.round, t, lead) and {vote.voter, vote.subject} <= {*members}

    def _may_vote(self, subject: int, t: int) -> bool:
        """Whether the peers left after all votes of this peer are a majority that includes it."""
        own = [vote for vote in self._known.values() if vote.voter == self._peer]
        quorum = Quorum(self._membership, subject, [*own, LossVote(self._peer, subject, t)])
        left = quorum.left - {vote.subject for vote in own}
        return self._peer in left and quorum.is_majority(left)

    def _vote(self, subject: int, t: int) -> None:
        message = pb.LossVote(voter=self._peer, subject=subject, round=t)
        said = self._statements.sign(LOST, message.SerializeToString(deterministic=True))
        self._known[subject, self._peer] = LossVote(self._peer, subject, t, said)
