"""Proof of a loss, for which the word of one member is not enough.

A loss cannot be taken back: a lost peer sets aside its training. Proof is therefore one of these, each with signatures:
the votes of a strict majority of the members (with `rounds.lost_after_s`), an operator's order, the lost peer's own
admission (`node.progress`), or two of its notes that contradict each other (`node.told`). A peer checks a loss here
before it announces it, before it journals one that it is told, and when it is shown its own. A replay does not check,
since a loss believed once stays so. All thus accept a loss that one honest member announces.

Nothing here depends on the time of the check, nor on other known losses: the callers judge whether votes are too old,
and whether the peers left may go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from peer.errors import RemoteProtocolError, SecurityError
from peer.gossip.incarnations import MAX_INCARNATIONS, Numbering
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.node import membership_codec
from peer.node.loss_votes import LOST, ORDER, Quorum, decode_vote, ordered
from peer.node.progress import check_admission
from peer.node.statements import MEMBERS, Statements
from peer.node.told import check_equivocation


@dataclass(frozen=True, kw_only=True)
class LossGrounds:
    """Judges losses by one peer's knowledge of members, names and certificates."""

    membership: Membership
    statements: Statements
    numbering: Numbering
    name_of: Callable[[int], str]
    """The name of the device with a number."""
    counts_votes: bool
    """Whether members declare losses themselves in this run."""

    def check(self, loss: Change) -> bool:
        """Return whether signatures prove a loss; False where nothing is signed in this run. Raises SecurityError, with
        the reason, for a loss that no majority or operator has decided, and the lost peer has neither admitted nor
        proven."""
        if loss.admitted:
            check_admission(self.statements, loss.subject, loss.admitted)
            return True
        if loss.equivocation:
            check_equivocation(self.statements, loss.subject, loss.equivocation)
            return True
        if loss.ordered:
            return self._check_order(loss)
        if loss.votes and self.counts_votes:
            return self._check_votes(loss)
        raise SecurityError("it comes without the order of an operator" + " or votes" * self.counts_votes)

    def check_frame(self, frame: bytes, number: int) -> Change:
        """Return the loss of peer `number` that a frame from anywhere proves. Raises SecurityError or
        RemoteProtocolError for one that proves none, and always where nothing is signed."""
        change = membership_codec.decode(frame, self.numbering.stride * MAX_INCARNATIONS, sender=number)
        if (change.kind, change.subject) != (ChangeKind.LOST, number) or change.issuer == number:
            raise SecurityError("it is about another peer")
        is_signed = self.statements.check(MEMBERS, change.issuer, frame[len(membership_codec.MAGIC) :])
        if not self.check(change) or not is_signed:
            raise SecurityError("nobody has signed it")
        return change

    def proves(self, frame: bytes | None, number: int) -> bool:
        """Return whether a frame from anywhere proves that peer `number` is lost."""
        try:
            return frame is not None and bool(self.check_frame(frame, number))
        except (SecurityError, RemoteProtocolError):
            return False

    def _check_order(self, loss: Change) -> bool:
        if ordered(loss.ordered) != (self.name_of(loss.subject), self.numbering.incarnation(loss.subject)):
            raise SecurityError("the operator's order is about another peer")
        return self.statements.check_order(ORDER, loss.ordered)

    def _check_votes(self, loss: Change) -> bool:
        votes = {vote.voter: vote for vote in map(decode_vote, loss.votes)}
        if len(votes) < len(loss.votes) or any(vote.subject != loss.subject for vote in votes.values()):
            raise SecurityError("its votes are about another peer, or somebody's are several")
        quorum = Quorum(self.membership, loss.subject, votes.values())
        if not quorum.has_decided:
            raise SecurityError(f"{len(quorum.voters)} have voted for it, and most members have to")
        return False not in {self.statements.check(LOST, voter, vote.said) for voter, vote in votes.items()}
