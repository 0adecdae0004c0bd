"""A member that tells one neighbour another story than the rest: in its frames, and in what it signs of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from peer import wire
from peer.compress.payload import Dense, Levels, Sparse, ValueType
from peer.daemon.process import Daemon
from peer.daemon.rounds import RoundLoop
from peer.gossip.effects import Effects, OutgoingFrame
from peer.node.durable import DurablePeer
from peer.node.told import TOLD, ToldParts, decode_told, encode_told


class TwoStories:
    """Puts a lie into a peer that otherwise does what any peer does."""

    def __init__(self, durable: DurablePeer, victim: int, rounds: range) -> None:
        """Tell `victim` something else in these rounds."""
        self.victim, self.rounds = victim, rounds
        self.signs_both = True
        """Whether the victim gets a signature of what it was told."""
        self.hold_back_s = 0.0
        """For so long after the rounds of the lie this peer does not sign what it told, and goes on regardless."""
        self.told = 0
        """Frames that were changed."""
        self._durable, self._participant = durable, durable.participant
        self.story = ToldParts(self._participant.algorithm.node.rounds)
        """What the victim was told, and everybody told this peer."""
        self._hear, self._publish = durable.told.hear, durable.publish
        self._close = durable.told.close
        durable.told.hear = self.hear  # type: ignore[method-assign]
        durable.told.close = self.close  # type: ignore[method-assign]
        durable.publish = self.publish  # type: ignore[method-assign]

    def hear(self, owner: int, round_: int, phase: int, frame: bytes) -> None:
        self._hear(owner, round_, phase, frame)
        is_own = owner == self._participant.peer and round_ in self.rounds
        self.story.hear(owner, round_, phase, self.changed(frame) if is_own else frame)

    def close(self, round_: int) -> None:
        self._close(round_)
        self.story.close(round_)

    def publish(self, effects: Effects) -> list[OutgoingFrame]:
        effects.frames = [self._lie(outgoing) for outgoing in effects.frames]
        return self._publish(effects)

    def note(self, note: bytes) -> bytes:
        """Return what the victim gets in the place of a note that this peer has signed."""
        if not self.signs_both:
            return note
        told = decode_told(note)
        first = min(told.digests)
        segments = {each: of for each, of in self.story.segments.items() if first <= each <= told.newest}
        statement = encode_told(told.peer, segments)
        assert statement is not None
        return self._participant.membership.statements.sign(TOLD, statement)

    def changed(self, frame: bytes) -> bytes:
        layout, dtype = self._participant.layout, self._participant.algorithm.x.dtype
        message = wire.decode(frame, layout, dtype=dtype)
        *others, last = message.layers
        if isinstance(last, Sparse):
            last = Dense(np.full(last.size, 0.5, np.float32), ValueType.FLOAT32)
        elif isinstance(last, Levels):
            last = replace(last, codes=np.roll(last.codes, 1))
        else:
            assert isinstance(last, Dense)
            last = replace(last, values=last.values + last.values.dtype.type(0.5))
        return wire.encode(
            replace(message, layers=(*others, last)), layout, packed=self._participant.algorithm.node.packed
        )

    def _lie(self, outgoing: OutgoingFrame) -> OutgoingFrame:
        is_lie = outgoing.told_in is not None and outgoing.told_in[0] in self.rounds
        if not is_lie or outgoing.receiver != self.victim:
            return outgoing
        self.told += 1
        return replace(outgoing, frame=self.changed(outgoing.frame))


def tells_two_stories(daemon: Daemon, victim: int, rounds: range) -> TwoStories:
    """Let a peer lie that has not begun yet."""
    assert isinstance(daemon.loop, RoundLoop)
    lie = TwoStories(daemon.loop.durable, victim, rounds)
    is_over = daemon.loop.durable.told.close
    equality = daemon.loop.equality
    assert equality is not None

    tell_all = daemon.neighbors.tell_all_linked

    def tell(topic: str, note: bytes, besides: Collection[int] = ()) -> None:
        if topic == TOLD and decode_told(note).peer == daemon.local.number:
            daemon.neighbors.transport.bulletin(victim, TOLD, lie.note(note))
            besides = {*besides, victim}
        tell_all(topic, note, besides)

    def close(round_: int) -> None:
        is_over(round_)
        if lie.hold_back_s and round_ == rounds.stop - 1:
            equality._told_at = daemon.runtime.now() + lie.hold_back_s
            equality._look = lambda: None  # type: ignore[method-assign]

    def linked(peer: int) -> list[bytes]:
        own = equality._own
        return [] if own is None else [lie.note(own) if peer == victim else own]

    daemon.loop.durable.told.close = close  # type: ignore[method-assign]
    daemon.neighbors.tell_all_linked = tell  # type: ignore[method-assign]
    daemon.parts.incoming._greetings[TOLD] = linked
    return lie
