"""The exchanges of a peer of a run without rounds: requests of neighbours are answered, the own one is completed.

Everything that touches the pair node happens in one worker thread, one call after the other, while another computes the
gradient. Messages that a call returns are in the journal by then.

Frames are not numbered: exchanges have numbers of their own, a request is repeated after a reconnect, and each has one
outcome.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass
from typing import TypeVar, TypeVarTuple

from peer.daemon.members.roster import Roster
from peer.daemon.neighbors import Neighbors
from peer.daemon.runtime import Runtime
from peer.errors import DivergenceError, RemoteProtocolError
from peer.gossip.effects import Effects
from peer.node.durable_pair import DurablePair

log = logging.getLogger("sotto")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_MAX_WAITING_FRAMES = 16
"""Frames of one neighbour that wait to be looked at: an honest one has one request and one answer on its way."""


@dataclass
class PairExchanges:
    """Answers the neighbours of one peer until it leaves."""

    runtime: Runtime
    neighbors: Neighbors
    roster: Roster
    durable: DurablePair
    recovered: InitVar[Effects]
    """The last effects of `durable` before a restart."""
    abandon_after_s: float
    """Longest absence of the partner of an open exchange before that is given up."""

    def __post_init__(self, recovered: Effects) -> None:
        """Go on with the open request."""
        self.failure: DivergenceError | None = None
        """Divergence found by an answer; training makes no sense after it."""
        self._participant = self.durable.participant
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exchange")
        self._waiting: deque[tuple[int, bytes | None]] = deque()
        """(neighbour, frame), or (neighbour, None) where its connection broke."""
        self._arrived = asyncio.Event()
        self._request = recovered.open_request
        """The own request without an answer; it is in the journal."""
        self._wake_at = recovered.wake_at
        """When the participant wants to ask again."""
        self._away_since: dict[int, float] = {}
        self._leaving = False
        self._answered = asyncio.Event()

    # -- what the transport calls --------------------------------------------------------------------------------------

    def frames_for(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        """Return the open request, if it is to the neighbour that is back."""
        self._away_since.pop(peer, None)
        return [(0, self._request.frame)] if self._request is not None and self._request.receiver == peer else []

    def disconnected(self, peer: int) -> None:
        """Take note that a connection broke: waiting frames from it will be asked for again."""
        self._away_since[peer] = self.runtime.now()
        self._forget_waiting(peer)
        self._waiting.append((peer, None))
        self._arrived.set()

    def frame_received(self, peer: int, seq: int, frame: bytes) -> bool | None:
        """Keep a frame until it is its turn. Raises RemoteProtocolError for more than an honest peer sends."""
        if seq:
            raise RemoteProtocolError("it numbers its frames, as nobody does in an asynchronous run")
        if sum(sender == peer for sender, _ in self._waiting) >= _MAX_WAITING_FRAMES:
            raise RemoteProtocolError("it sends more than it is asked for")
        self._waiting.append((peer, frame))
        self._arrived.set()
        return None

    def receipt(self, peer: int, upto: int) -> None:
        """Raise RemoteProtocolError: there are no numbered frames to confirm."""
        raise RemoteProtocolError("it confirms numbered frames, which nobody sends in an asynchronous run")

    def last_received(self, peer: int) -> int:
        """Return 0: frames are not numbered."""
        return 0

    # -- what the loop calls -------------------------------------------------------------------------------------------

    async def call(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Return the result of a call on the pair node. Calls run one at a time, in the order in which they were
        made."""
        reachable = self.neighbors.reachable()

        def call() -> T:
            # Set in the worker, so that no call before this one sees it: it is journaled with the call.
            self._participant.reachable = reachable
            return function(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._worker, call)

    def perform(self, effects: Effects) -> None:
        """Perform the effects of a call."""
        self._request, self._wake_at = effects.open_request, effects.wake_at
        for outgoing in effects.frames:
            self.neighbors.traffic.handed_over(outgoing)
            if self.neighbors.is_up(outgoing.receiver):
                self.neighbors.transport.send(outgoing.receiver, 0, outgoing.frame)
        for error in effects.refused:
            assert error.peer is not None
            self._refuse(error.peer, error)
        self.runtime.wake()
        self._arrived.set()

    async def answer(self) -> None:
        """Take the neighbours' frames, and ask again when a pause is over, until `stop_answering`."""
        try:
            while not self._leaving:
                wake_at = self._wake_at
                if self._waiting:
                    await self._take(*self._waiting.popleft())
                elif wake_at is not None and self.runtime.now() >= wake_at:
                    self.perform(await self.call(self.durable.timer, self.runtime.now()))
                else:
                    await self.runtime.wait(wake_at, self._arrived)
        except DivergenceError as error:
            # The loop ends with it, as with what the own steps come to; this task must not end the process on its own.
            self.failure = error
            self.runtime.wake()
        self._answered.set()

    async def _take(self, peer: int, frame: bytes | None) -> None:
        if frame is None:
            self.perform(await self.call(self.durable.disconnected, peer))
            return
        try:
            effects = await self.call(self.durable.receive, peer, frame, self.runtime.now())
        except Exception as error:  # No error for a frame ends this process.
            self._refuse(peer, error)
            return
        self.perform(effects)

    def _refuse(self, peer: int, error: Exception) -> None:
        self._forget_waiting(peer)
        self.neighbors.transport.blame(peer, error)

    def _forget_waiting(self, peer: int) -> None:
        self._waiting = deque(item for item in self._waiting if item[0] != peer)

    async def abandon_the_lost(self) -> None:
        """Give up the open exchange if its partner has been away for too long."""
        partner = self._participant.open_partner
        if partner is None or self.neighbors.is_up(partner):
            return
        now = self.runtime.now()
        away = now - self._away_since.setdefault(partner, now)
        if away > self.abandon_after_s:
            log.warning("%s has been away for %.0f s: its exchange is given up", self.roster.name(partner), away)
            self.perform(await self.call(self.durable.abandon, partner))

    async def stop_answering(self) -> None:
        """Return when the last answer is given: later requests are not answered."""
        self._leaving = True
        self._arrived.set()
        await self._answered.wait()

    def close(self) -> None:
        """End the thread after its present call."""
        self._worker.shutdown(wait=True, cancel_futures=True)
