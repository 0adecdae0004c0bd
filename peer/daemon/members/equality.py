"""Whether members were told the same: this peer signs what it told all others alike and what it was told in that way,
compares that with their statements, and goes no further than they agree.

`node.told` knows what is compared and what proves a contradiction. Here are the links and the clock. A peer makes a
statement at most once a second, and at most every ten rounds. It begins no round while a member contradicts what it
heard, or has stated nothing about the rounds before the last eighty: the models may be apart. The log and `sotto
status` name the members that it waits for. Two contradicting notes of one member prove that it lies, and are a ground
to go on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from peer.daemon.local_peer import LocalPeer
from peer.daemon.members.change_requests import ChangeRequests
from peer.daemon.neighbors import Neighbors
from peer.daemon.notes import notes
from peer.daemon.notes.releases import Releases
from peer.daemon.runtime import Runtime
from peer.errors import RemoteProtocolError, SecurityError
from peer.gossip.base import GraphNeed
from peer.gossip.membership import ChangeKind
from peer.node.durable import DurablePeer
from peer.node.told import SEGMENT_ROUNDS, TOLD, Comparison, decode_told
from peer.protocol import EQUALITY
from peer.rate_limits import Allowances

log = logging.getLogger("sotto")

_TELL_EVERY_S = 1.0
_TELL_AT_ONCE_S, _AT_ONCE_SEGMENTS = 0.2, 4
"""Least interval, used once as many segments wait to be told: rounds are fast then."""
_AGAIN_S = 5.0
"""Interval at which a waiting peer repeats its notes: one may be lost."""
_NEWS = {"rate": 5.0, "burst": 40.0}
"""Notes of one member that are looked at, by second."""
_PATIENCE_SEGMENTS = 8
_DECLARE_EVERY_S = 3.0


@dataclass
class Equality:
    """One peer's part in it."""

    local: LocalPeer
    runtime: Runtime
    neighbors: Neighbors
    durable: DurablePeer
    requests: ChangeRequests
    releases: Releases
    hearsay: notes.Hearsay

    def __post_init__(self) -> None:
        """Begin with nothing to tell."""
        self._roster, self._first = self.local.roster, self.local.setup.first_members
        self._participant, self._me = self.durable.participant, self.durable.participant.peer
        self._comparison = Comparison(self._me, self.durable.told, self.local.statements)
        self._passes_on = self._participant.algorithm.spec.graph is not GraphNeed.COMPLETE
        """Whether some members have no link to each other."""
        self._news = Allowances(**_NEWS)
        self._own: bytes | None = None
        self._told_segment = -1
        self._told_at = float("-inf")
        self._since: int | None = None
        """First round from which all members have to report what they were told; None while some run an older
        release."""
        self._declare_at: dict[int, float] = {}
        self._named: dict[int, str] = {}

    # -- what is heard and told ----------------------------------------------------------------------------------------

    def linked(self, peer: int) -> list[bytes]:
        """Return the notes for a connected neighbour."""
        return [] if self._own is None else [self._own]

    def heard(self, source: int, note: bytes) -> None:
        """Judge a note of a neighbour. Raises RemoteProtocolError if it is malformed."""
        try:
            told = decode_told(note)
        except SecurityError as error:
            raise RemoteProtocolError(f"told what it was told: {error}") from None
        # Before the signature is looked at: several may bring the same.
        if told.peer not in self._members() or not self._comparison.is_news(told):
            return
        if self.hearsay.teller(TOLD, note, told.peer, source, self._news) is not None:
            self._comparison.take(told)
            if self._passes_on:
                self.neighbors.tell_all_linked(TOLD, note, {source, told.peer})
            self._look()
            self.runtime.wake()

    async def after_round(self) -> None:
        """Report what was told, if it is due, and compare."""
        if self._since is None:
            if not self.releases.all_speak(EQUALITY):
                return
            # From here on the digests are in checkpoints, which older releases would drop.
            await self.runtime.work(self.durable.disk_state.pin, EQUALITY)
            self._since = self._participant.round + self._participant.membership.longest_lead + 1
        self.say()
        self._look()

    def say(self) -> None:
        """Tell all others the digests of the segments that are over, if it is time to: also in a round that others
        hold up, since they may wait for it."""
        segments, now = self.durable.told.segments, self.runtime.now()
        newest = max(segments, default=-1)
        waiting = newest - self._told_segment
        soon_s = _TELL_AT_ONCE_S if waiting >= _AT_ONCE_SEGMENTS else _TELL_EVERY_S
        is_last = self._participant.round == self._participant.algorithm.node.rounds
        if self._since is None or waiting <= 0 or (now < self._told_at + soon_s and not is_last):
            return
        self._own = self._comparison.own_note(self._members())
        self._told_segment, self._told_at = newest, now
        assert self._own is not None
        self.neighbors.tell_all_linked(TOLD, self._own)

    def waits_for(self) -> Mapping[int, str]:
        """Return member → why no further round begins before it has said something else, or is out of the run."""
        t, since, members = self._participant.round, self._since, self._members()
        if since is None:
            return {}
        found: dict[int, str] = {}
        due = t // SEGMENT_ROUNDS - _PATIENCE_SEGMENTS
        comparison, name = self._comparison, self._roster.name
        for peer in members:
            owner = comparison.differs.get(peer)
            if peer in comparison.proofs:
                found[peer] = "has signed that it told different things to different members"
            elif owner == peer:
                found[peer] = "has signed something else than it told this peer"
            elif owner is not None:
                found[peer] = f"says that {name(owner)} told it something else than this peer"
            elif comparison.confirmed.get(peer, -1) < due and self._was_there(peer, due * SEGMENT_ROUNDS, since):
                found[peer] = "has not signed for long what it told and was told"
        return found

    def keep_to(self) -> bool:
        """Return whether a further round may begin; if not, name the members that this peer waits for."""
        self._look()
        waits_for = self.waits_for()
        for peer, why in waits_for.items():
            if self._named.get(peer) != why:
                name = self._roster.name(peer)
                log.error(
                    "round %d does not begin while the models of the members may be apart: %s %s; the others can go "
                    "on without whoever lies (sotto remove)",
                    self._participant.round,
                    name,
                    why,
                )
        self._named = dict(waits_for)
        if waits_for and self._own is not None and self.runtime.now() >= self._told_at + _AGAIN_S:
            self._told_at = self.runtime.now()
            self.neighbors.tell_all_linked(TOLD, self._own)
        return not waits_for

    @property
    def awaits_the_last_words(self) -> bool:
        """Whether the run is over here, and a present member has yet to report what it was told in the end."""
        newest, comparison = max(self.durable.told.segments, default=-1), self._comparison
        present = self._members() - self.neighbors.left.keys() - comparison.differs.keys() - comparison.proofs.keys()
        return self._since is not None and any(comparison.confirmed.get(peer, -1) < newest for peer in present)

    def figures(self) -> dict[str, object]:
        """Return the round up to which all members are known to have been told the same, and the members waited for."""
        confirmed = [self._comparison.confirmed.get(peer, -1) for peer in self._members()]
        upto = min(confirmed, default=-1)
        waits_for = {self._roster.name(peer): why for peer, why in self.waits_for().items()}
        return {"compared_rounds": (upto + 1) * SEGMENT_ROUNDS, "not_equal": waits_for}

    # -- inside --------------------------------------------------------------------------------------------------------

    def _members(self) -> set[int]:
        """Return the other members of the coming round, or the one under way, that are not lost."""
        members = self._participant.membership.members
        return {*(self._first if members is None else members)} - self._participant.session.lost - {self._me}

    def _was_there(self, peer: int, round_: int, since: int) -> bool:
        """Whether a peer and this one both know everything that was told since a round."""
        joins = (each for each in self._participant.membership.changes if each.kind is ChangeKind.JOIN)
        began = [each.effective for each in joins if each.subject in (peer, self._me)]
        return round_ >= max([since, *began])

    def _look(self) -> None:
        """Compare, show others the notes that they should see, and ask to go on without members proven to lie."""
        if self._since is None:
            return
        comparison, members = self._comparison, self._members()
        for note in comparison.look(members):
            self.neighbors.tell_all_linked(TOLD, note)
        now = self.runtime.now()
        for subject, proof in comparison.proofs.items():
            if subject not in members:
                continue
            if subject not in self._declare_at:
                log.error(
                    "%s has signed that it told different things to different members; the two notes prove it",
                    self._roster.name(subject),
                )
                for note in proof:
                    self.neighbors.tell_all_linked(TOLD, note)
                # One announcement is enough; the others step in if none comes.
                place = sorted({*members, self._me} - {subject}).index(self._me)
                self._declare_at[subject] = now + place * _DECLARE_EVERY_S
            if now >= self._declare_at[subject] and self._participant.membership.views is not None:
                self._declare_at[subject] = now + _DECLARE_EVERY_S * (1 + len(members))
                self.requests.declare_lost(subject, equivocation=proof)
