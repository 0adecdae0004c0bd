"""Class frequencies in the data of all devices, where no device knows them: devices tell each other before the first
round (`data.class_shares = "vote"`).

Logit adjustment needs them. Every device that the run begins with tells the class frequencies in its own training data,
and the notes spread from neighbour to neighbour. Nobody begins the first round before all have told, so that all begin
with the same shares: the mean of those told, or, where every sample is to count alike, the mean weighted by the numbers
of samples. A device that lies moves the result by its own weight, and no further.

A device could tell each of the others a different vote, and leave them with different shares. Each device therefore
also tells a digest of the votes that it has, and none begins before all have told the same one. Votes that are complete
are replaced no more. Where digests differ, the votes are told again, until everybody has seen two votes of one voter,
signed by it.

The notes are kept beside the state. A device that is started again adjusts by the same shares, and those that join
later hear the notes from whomever they meet first; they tell nothing themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from peer.config.options import VOTE
from peer.daemon.neighbors import Neighbors
from peer.daemon.notes import notes
from peer.daemon.runtime import Runtime
from peer.errors import ConfigError, PeerUnreachable, RemoteProtocolError
from peer.node.statements import is_later
from peer.proto.sottovoce.v1.note_pb2 import ClassNote
from peer.rate_limits import Allowances
from peer.state.disk import Disk
from peer.state.kept_file import CLASS_VOTES
from peer.state.recovery import begin_anew, begun_round
from peer.train.label_adjustment import Float64Array, mean_shares

log = logging.getLogger("sotto")

_AGAIN_S = 10.0
"""Interval at which a waiting peer repeats its notes, since one may be lost. Those that wait no more answer with all
that they have, as often at most."""
_NEWS = {"rate": 0.1, "burst": 10.0}
"""Notes of one peer that are looked at and passed on, by second: one that starts again before the run begins says it
once more."""


@dataclass
class ClassVotes:
    """The class votes of the devices, as one of them hears them."""

    hearsay: notes.Hearsay
    counts: Sequence[int]
    """Samples of each class on which this peer trains."""
    _: KW_ONLY
    voters: frozenset[int]
    """The peers that the run begins with."""
    total_samples: int | None
    """Samples of all devices, where every sample is to count alike."""
    disk: Disk
    neighbors: Neighbors
    runtime: Runtime
    name: Callable[[int], str]
    all_speak: Callable[[], bool]
    """Returns whether all devices tell digests of the votes."""
    use: Callable[[Float64Array], None]
    """Told the result, before any round."""

    def __post_init__(self) -> None:
        """Recall the votes. Raises ConfigError for a run that began without votes, and StateError."""
        self._own = notes.class_vote(self.hearsay.own, self.counts, tells_samples=self.total_samples is not None)
        self.hearsay = replace(self.hearsay, peers=self.voters)
        self._news, self._answers = Allowances(**_NEWS), Allowances(rate=1 / _AGAIN_S, burst=1)
        self._report_news = Allowances(**_NEWS)
        self._notes: dict[int, bytes] = {}
        self._votes: dict[int, ClassNote] = {}
        self._reports: dict[int, tuple[bytes, bytes]] = {}
        """Voter → (digest of the votes that it has, the note that said so)."""
        self.told_two: dict[int, tuple[bytes, bytes]] = {}
        """Voter → two different votes that it has signed."""
        self.is_settled = False
        """Whether the shares are known, and in use."""
        self._recall()

    @property
    def missing(self) -> list[int]:
        """Peers whose vote this peer has not heard yet."""
        return sorted(self.voters - self._notes.keys())

    @property
    def unequal(self) -> list[int]:
        """Voters that have not told yet that they have the votes that this peer has; nobody, where some devices cannot
        tell, or this one gives no vote."""
        if self.missing or self._own.peer not in self.voters or not self.all_speak():
            return []
        own = self._digest()
        return sorted(voter for voter in self.voters if self._reports.get(voter, (b"", b""))[0] != own)

    async def settle(self, linked: Callable[[], Collection[int]]) -> None:
        """Wait until all have voted, or this peer is to stop; then use the result. `linked()` returns the peers to be
        linked to. Raises HandshakeRefused and PeerUnreachable where nobody will tell, and StateError."""
        if self.is_settled:
            return
        self._vote()
        if self.missing:
            log.info("waits for the shares of the classes of %s", ", ".join(map(self.name, self.missing)))
        again_at = self.runtime.now() + _AGAIN_S
        self._report()
        while self.missing or self.unequal:
            if self.runtime.stops:
                return
            if self.runtime.now() >= again_at:
                again_at = self.runtime.now() + _AGAIN_S
                self._tell_again()
                if self.unequal:
                    unequal = ", ".join(map(self.name, self.unequal))
                    log.warning("does not begin: %s have not said that they have the same votes", unequal)
            others = linked()
            if others and all(self.neighbors.left.get(peer) == "completed" for peer in others):
                raise PeerUnreachable("the run came to its end before this peer could take part in it")
            self.neighbors.give_up_if_refused(others, self.runtime.now())
            await self.runtime.wait(again_at)
        CLASS_VOTES.keep(self.disk, self._notes)
        await self.runtime.work(self._settle)

    # -- what is heard and told ----------------------------------------------------------------------------------------

    def linked(self, peer: int) -> Iterable[bytes]:
        """Return the notes that a neighbour should hear that is connected."""
        self._vote()
        return [self._notes[voter] for voter in sorted(self._notes) if voter != peer]

    def linked_reports(self, peer: int) -> Iterable[bytes]:
        """Return the reports for a connected neighbour of the votes that each voter has."""
        self._vote()
        self._report()
        return [note for voter, (_, note) in sorted(self._reports.items()) if voter != peer]

    def heard_report(self, source: int, note: bytes) -> None:
        """Judge a neighbour's report of the votes that a voter has. Raises RemoteProtocolError if it is malformed."""
        voter, digest = notes.decode_shares(note)
        if voter == self._own.peer or voter not in self.voters:
            return
        known = self._reports.get(voter)
        if known is not None and (known[0] == digest or not self._is_later(source, voter, known[1], note)):
            return
        if self.hearsay.teller(notes.CLASS_SHARES, note, voter, source, self._report_news) is not None:
            self._reports[voter] = digest, note
            self.neighbors.broadcast(notes.CLASS_SHARES, note, source)
            self._report()
            if not self.missing and digest != self._digest():
                # This shows everybody which votes differ.
                self._tell_again()
            self.runtime.wake()

    def heard(self, source: int, note: bytes) -> None:
        """Judge a note of a neighbour, and pass it on if it is news. Raises RemoteProtocolError if it is malformed."""
        vote = self._decoded(note)
        if not self.missing:
            # Complete votes stay as they are; a peer that repeats them may wait for a part of them.
            if vote != self._votes.get(vote.peer):
                self._compare(source, vote.peer, note)
            self._answer(source)
            return
        known = self._notes.get(vote.peer)
        if vote.peer not in self.voters or (known is not None and not self._is_later(source, vote.peer, known, note)):
            return
        if self.hearsay.teller(notes.CLASSES, note, vote.peer, source, self._news) is not None:
            self._notes[vote.peer], self._votes[vote.peer] = note, vote
            self.neighbors.broadcast(notes.CLASSES, note, source)
            self._report()
            self.runtime.wake()

    def _compare(self, source: int, voter: int, note: bytes) -> None:
        """Name a voter that has signed another vote than the one that counts here, and show that to the others."""
        if voter not in self._votes or voter in self.told_two:
            return
        if not self.hearsay.is_signed(notes.CLASSES, voter, note, "another vote"):
            return
        self.told_two[voter] = self._notes[voter], note
        self.neighbors.broadcast(notes.CLASSES, note, source)
        if voter == self._own.peer:
            log.error("this device voted on the shares of the classes before, and its data has changed since")
        else:
            log.error(
                "%s has signed two different votes on the shares of the classes: its data has changed since it first "
                "voted, or it lies; stop all devices, and start them again with its data settled, or without it",
                self.name(voter),
            )

    def _report(self) -> None:
        """Tell which votes this peer has, once it has all."""
        if self.missing or self._own.peer not in self.voters or self._own.peer in self._reports:
            return
        if not self.all_speak():
            return
        digest = self._digest()
        note = self.hearsay.statements.sign(notes.CLASS_SHARES, notes.encode_shares(self._own.peer, digest))
        self._reports[self._own.peer] = digest, note
        self.neighbors.broadcast(notes.CLASS_SHARES, note)

    def _digest(self) -> bytes:
        """Return a digest of the votes of all, proofs aside."""
        return notes.digest_of(self._votes[voter].SerializeToString() for voter in sorted(self.voters))

    def _tell_again(self) -> None:
        """Tell all neighbours all that this peer knows."""
        for note in self._notes.values():
            self.neighbors.broadcast(notes.CLASSES, note)
        for _, note in self._reports.values():
            self.neighbors.broadcast(notes.CLASS_SHARES, note)

    def _answer(self, source: int) -> None:
        if self._answers.spend(source, self.runtime.now()):
            for each in self.linked(source):
                self.neighbors.transport.bulletin(source, notes.CLASSES, each)
            for each in self.linked_reports(source):
                self.neighbors.transport.bulletin(source, notes.CLASS_SHARES, each)

    def _vote(self) -> None:
        if self._own.peer in self.voters and self._own.peer not in self._notes:
            self._notes[self._own.peer] = self.hearsay.statements.sign(notes.CLASSES, self._own.SerializeToString())
            self._votes[self._own.peer] = self._own

    def _is_later(self, source: int, voter: int, known: bytes, note: bytes) -> bool:
        """Return whether a note of a voter takes the place of one that is known."""
        return is_later(note, known, unsigned=source == voter and note != known)

    def _decoded(self, note: bytes) -> ClassNote:
        vote = notes.decode_class_vote(note, len(self._own.shares))
        most = self.total_samples or 0
        if not min(1, most) <= vote.samples <= most:
            raise RemoteProtocolError(f"told of {vote.samples} samples, where all devices have {most}")
        return vote

    # -- what it comes to ----------------------------------------------------------------------------------------------

    def _recall(self) -> None:
        """Take up the notes kept by an earlier process."""
        kept = CLASS_VOTES.read(self.disk)
        try:
            # The list of peers can be mended until the run has begun.
            self._notes = {peer: note for peer, note in (kept or {}).items() if peer in self.voters}
            self._votes = {peer: self._decoded(note) for peer, note in self._notes.items()}
        except RemoteProtocolError:
            raise CLASS_VOTES.damaged(self.disk) from None
        if kept is not None and not self.missing:
            self._settle()
        elif (begun := begun_round(self.disk)) is not None:
            raise ConfigError(
                f"cannot be set in a run that began without it, or that lost {CLASS_VOTES.name}: its rounds cannot"
                f" be repeated with other shares; set what it began with, or {begin_anew(begun)}",
                key="data.class_shares",
                value=VOTE,
            )

    def _settle(self) -> None:
        votes = {**self._votes, self._own.peer: self._votes.get(self._own.peer, self._own)}
        told = [votes[peer] for peer in sorted(votes)]
        weights = [1 if self.total_samples is None else vote.samples for vote in told]
        shares = mean_shares([vote.shares for vote in told], weights)
        log.info("shares of the classes, from %d devices: %s", len(told), ", ".join(f"{share:.3g}" for share in shares))
        self.use(shares)
        self.is_settled = True
