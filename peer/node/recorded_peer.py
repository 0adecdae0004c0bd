"""A participant and its links, changed by journal records and by nothing else.

A running peer writes a record and then applies it here; a recovering peer reads the record and applies it here again.
Because both go the same way, a recovered peer equals the one that ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from peer.gossip.effects import Effects
from peer.gossip.membership import Change, ChangeKind
from peer.node import membership_codec
from peer.node.disk_state import model_digest
from peer.node.held_frames import EarlyFrames, WaitingFrames
from peer.node.links import Links
from peer.node.participant import Participant
from peer.node.told import ToldParts
from peer.state.journal import FULL_WIDTH, Announced, Begun, Lost, Received, TimedOut
from peer.wire.message import Message


class RecordedPeer:
    """One peer between its journal and its algorithm."""

    def __init__(self, participant: Participant, neighbors: Collection[int]) -> None:
        self.participant = participant
        self.links = Links(participant.peer, neighbors)
        self.waiting = WaitingFrames()
        self.early = EarlyFrames()
        self.told = ToldParts(participant.algorithm.node.rounds)

    def begin(self, record: Begun) -> Effects:
        """Do the exchange of a round whose local step is done."""
        in_full_width = record.variant == FULL_WIDTH
        return self._counted(
            self.participant.begin(record.now, frozenset(record.left_out), in_full_width=in_full_width)
        )

    def time_out(self, record: TimedOut) -> Effects:
        """Go on without late neighbours, if it is time."""
        return self._counted(self.participant.timer(record.now))

    def take(self, record: Received, content: Message | Change | None = None, *, is_counted: bool = False) -> Effects:
        """Apply a frame and count it, unless it is counted already. `content`: its content, if it was judged. If not,
        raises RemoteProtocolError, which names the sender, before anything changes."""
        if content is None:
            content = self.participant.judged(record.peer, record.frame)
        effects = self.participant.take(content, record.now, source=record.peer)
        if isinstance(content, Message) and not effects.duplicates and self.participant.is_for_all(content):
            self.told.hear(record.peer, content.round, content.phase, record.frame)
        self._counted(effects)
        # Before the count: with the news that it joins, a newcomer's stream begins with this very frame.
        self._restart_links_with(effects.news)
        if record.seq:
            if not is_counted:
                self.links.incoming[record.peer].accept(record.seq)
            if not membership_codec.is_notice(record.frame):
                self.waiting.add(record.peer, record.seq, record.frame)
        return effects

    def announce(self, record: Announced) -> Effects:
        """Note an own announcement."""
        num_peers = self.participant.algorithm.node.schedule.num_peers
        change = membership_codec.decode(record.frame, num_peers, sender=self.participant.peer)
        effects = self._counted(self.participant.learn(change, record.now))
        self._restart_links_with(effects.news)
        return effects

    def lose(self, record: Lost, unreceived: Sequence[bytes] | None = None) -> Effects:
        """Go on without a lost peer. Frames that it does not have for good, by the record, were never given:
        `unreceived`, if they were taken from the links already."""
        if unreceived is None:
            _, unreceived = self.links.give_up(record.peer, record.upto)
        self.waiting.forget(record.peer)
        self.early.forget(record.peer)
        return self._counted(self.participant.lose(record.peer, unreceived, record.now))

    def _counted(self, effects: Effects) -> Effects:
        """Count the frames of a call that all others got alike, and the end of its round; return its effects."""
        for outgoing in effects.frames:
            if outgoing.told_in is not None:
                self.told.hear(self.participant.peer, *outgoing.told_in, outgoing.frame)
        if effects.finished is not None:
            self.told.close(effects.finished)
        return effects

    def forget_used(self) -> None:
        """Forget received frames but those that wait for a later round."""
        self.waiting.keep_newest(self.participant.session.inbox.unconsumed_counts())

    def digest(self) -> int:
        """Return a digest of x and u, of which every message is made. The rest of the state shows in later messages."""
        return model_digest(self.participant.algorithm.x, self.participant.algorithm.u)

    def _restart_links_with(self, news: Collection[Change]) -> None:
        """Count from 1 with a joining peer, whatever it was sent while it was no member."""
        for change in news:
            if change.kind is not ChangeKind.JOIN or change.subject == self.participant.peer:
                continue
            joins = [
                each
                for each in self.participant.membership.changes
                if (each.kind, each.subject) == (change.kind, change.subject)
            ]
            # If two sponsors announce it at the same time, the peer may have been heard since the first; and a newcomer
            # may hear from a member, or from that member itself, that it once joined.
            known = self.links.incoming.get(change.subject)
            if len(joins) == 1 and (known is None or known.last_seq == 0):
                # Its early frames, from before it was known here, are the beginning of the same count.
                self.links.restart(change.subject)
