"""The frames of a peer of a run in rounds: those that came wait here for the loop, those that a call made leave here.

The order persist, send, apply is kept by `DurablePeer`: it has journaled everything that `perform` is given to send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass

from peer.daemon.members.member_links import MemberLinks
from peer.daemon.neighbors import Neighbors
from peer.daemon.runtime import Runtime
from peer.errors import HandshakeRefused
from peer.gossip.effects import Effects
from peer.node.durable import DurablePeer
from peer.node.local_steps import StepAbandoned
from peer.records import RoundRecord


@dataclass
class RoundFrames:
    """Frames on their way between the transport and the participant."""

    runtime: Runtime
    neighbors: Neighbors
    durable: DurablePeer
    recovered: InitVar[Effects]
    """The last effects of `durable` before a restart."""
    member_links: MemberLinks
    on_late: Callable[[int, Sequence[int]], None]
    """Called with a round that ended without some peers, and these."""
    on_durable: Callable[[], None]
    """Called before neighbours are told which frames they may forget."""

    def __post_init__(self, recovered: Effects) -> None:
        """Go on with the timer."""
        self.wake_at = recovered.wake_at
        """When a late neighbour is no longer waited for; None where there is none to wait for, or for ever."""
        self._participant = self.durable.participant
        self._waiting: deque[tuple[int, int, bytes]] = deque()
        """(neighbour, number, frame). Bounded by the credit of each link, which is given back one by one."""

    def __bool__(self) -> bool:
        """Whether frames wait to be looked at."""
        return bool(self._waiting)

    # -- what the transport calls --------------------------------------------------------------------------------------

    def frames_for(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        """Return the frames for a connected neighbour that durably has ours up to `remote_has`."""
        self.durable.links.meet(peer)
        if peer in self._participant.session.lost:
            raise HandshakeRefused("it was declared lost; it comes back by itself, as a newcomer")
        self.member_links.link_up(peer)
        frames = self.durable.connected(peer, remote_has)
        self.member_links.confirmed(peer)
        return frames

    def disconnected(self, peer: int) -> None:
        """Take note that a connection broke: whole frames still count, and the rest will come again."""
        self.member_links.link_down()

    def frame_received(self, peer: int, seq: int, frame: bytes) -> bool | None:
        """Keep a frame for `take`; its credit goes back when it has been looked at."""
        self._waiting.append((peer, seq, frame))
        return False

    def receipt(self, peer: int, upto: int) -> None:
        """Take note that a neighbour has our frames up to `upto` for good."""
        self.durable.links.acknowledge(peer, upto)
        self.member_links.confirmed(peer)

    def last_received(self, peer: int) -> int:
        """Return the number of the last frame of a neighbour that need not be sent again."""
        self.durable.links.meet(peer)
        return self.durable.links.durable_from(peer)

    # -- what the loop calls -------------------------------------------------------------------------------------------

    async def take(self) -> RoundRecord | None:
        """Give the waiting frames to the participant, and the timer if it is due; return the record of a round that
        this completed. Later frames then wait for the next round."""
        while self._waiting:
            waiting = tuple(self._waiting)
            number, effects, error = await self.runtime.work(self._receive, waiting, self.runtime.now())
            for _ in range(number):
                peer, seq, _ = self._waiting.popleft()
                self.neighbors.transport.taken(peer, seq)
            record = None if effects is None else self.perform(effects)
            if error is not None:
                self._refuse(peer, error)
            if record is not None:
                return record
        if self.wake_at is not None and self.runtime.now() >= self.wake_at:
            return self.perform(await self.runtime.work(self.durable.timer, self.runtime.now()))
        return None

    def _receive(
        self, frames: Sequence[tuple[int, int, bytes]], now: float
    ) -> tuple[int, Effects | None, Exception | None]:
        """Give frames to the participant, up to one that asks for more than waiting, or that is refused: a change of
        threads costs as much as many a frame. Return the number of frames given to it, the effects of those that were
        taken, None if none was, and why the last one was refused."""
        effects: Effects | None = None
        for number, (peer, seq, frame) in enumerate(frames, start=1):
            try:
                asked = self.durable.receive(peer, seq, frame, now)
            except StepAbandoned:
                raise
            except Exception as error:  # No error for a frame ends this process.
                return number, effects, error
            if effects is None:
                effects = asked
            else:
                effects.extend(asked)
            if asked.frames or asked.news or asked.refused or asked.finished is not None:
                return number, effects, None
        return len(frames), effects, None

    def perform(self, effects: Effects) -> RoundRecord | None:
        """Perform the effects of a call, which are on disk by now; return the record of a round that it ended."""
        self.wake_at = effects.wake_at
        if effects.finished is not None and effects.skipped:
            self.on_late(effects.finished, effects.skipped)
        for outgoing in effects.frames:
            self.neighbors.traffic.handed_over(outgoing)
        if effects.news:
            # First, so that there are links to those that are told of it.
            self.member_links.meet()
        for outgoing in self.durable.publish(effects):
            # Without a connection, `frames_for` will send it.
            if self.neighbors.is_up(outgoing.receiver):
                self.neighbors.transport.send(outgoing.receiver, outgoing.seq, outgoing.frame)
        self.confirm(effects.receipts)
        for error in effects.refused:
            assert error.peer is not None
            self._refuse(error.peer, error)
        return effects.record

    def _refuse(self, peer: int, error: Exception) -> None:
        """Drop a neighbour's frames on this link: they make no sense without the refused one. After the reconnect all
        of them come again."""
        self._waiting = deque(item for item in self._waiting if item[0] != peer)
        self.neighbors.transport.blame(peer, error)

    def confirm(self, receipts: Mapping[int, int]) -> None:
        """Tell the neighbours which of their frames they may forget."""
        if receipts:
            self.on_durable()
        for peer, upto in receipts.items():
            self.neighbors.transport.acknowledge(peer, upto)

    def owes(self, peer: int) -> bool:
        """Return whether a neighbour lacks frames of this peer, which is there to give them."""
        return peer not in self.neighbors.left and self.durable.links.out[peer].backlog > 0

    def backlog_bytes(self, peer: int) -> int:
        """Return the bytes that a neighbour has not confirmed yet."""
        return self.durable.links.out[peer].backlog_bytes
