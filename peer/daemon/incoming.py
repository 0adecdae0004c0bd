"""Entry of everything from others into the daemon: each call of the transport finds the part that judges it.

This is the boundary of trust. A neighbour is authenticated, but not trusted: it may be broken or hostile. Its input is
judged by the part that uses it:

| what | judged by |
| --- | --- |
| frames, receipts, numbers of frames | `round_frames` or `pair_exchanges`, and the participant below |
| notes: their form | `notes` |
| evaluations, divergences | `evaluations`, `divergence` |
| votes on who is lost | `loss_watch` |
| what they run | `releases` |
| how frequent their classes are, and whether all heard the same | `class_votes` |
| how far they are, in hellos too | `progress` |
| what they told and were told alike | `equality` |
| shares of the average after the last round | `final_average` |
| digests of replicas, and of data | `replica_check`, `data_check` |
| requests to join, and the answer to one | `change_requests`, `joining` |
| calls of an operator | `operator_api` |

Each raises RemoteProtocolError for input that no honest peer sends. The transport then closes the link with that
sentence, as it does after any other error (`peer.net.links.Links.blame`). This also holds for notes that the neighbour
passes on: it should have refused them itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from peer.daemon.final_average import FinalAverage
from peer.daemon.notes import notes as topics
from peer.daemon.operator.operator_api import OperatorApi
from peer.daemon.pairs import PairLoop
from peer.daemon.parts import CommonParts, Greeting, Judge
from peer.daemon.rounds import RoundLoop
from peer.errors import HandshakeRefused
from peer.foreign_text import quote
from peer.net.neighbor import Neighbor
from peer.node.loss_votes import LOST
from peer.node.told import TOLD
from peer.rate_limits import Allowances

log = logging.getLogger("sotto")

_NOTES = {topics.DIVERGED: (10.0, 100.0), topics.REPLICA: (10.0, 100.0)}
"""Topic → (notes a second, notes at once) that are read of one neighbour. A joining peer asks every five seconds."""
_OTHER_NOTES = (0.5, 5.0)
_GOODBYES = {"completed": "has finished", "left": "has left the run"}
"""Last word of a neighbour → the sentence about it."""


class Incoming:
    """The handler of the transport."""

    def __init__(
        self,
        common: CommonParts,
        loop: RoundLoop | PairLoop,
        *,
        average: FinalAverage,
        operator: OperatorApi,
        notes: Mapping[str, Judge],
        greetings: Mapping[str, Greeting],
    ) -> None:
        """`notes`: topic → who judges notes about it. `greetings`: topic → source of the notes for a neighbour when it
        is connected."""
        self._runtime, self._neighbors, self._roster = common.runtime, common.neighbors, common.local.roster
        self._frames, self._members, self._loop = loop.frames, loop.requests, loop
        self._average, self._operator, self._notes, self._greetings = average, operator, dict(notes), dict(greetings)
        self._why_no_changes, num_peers = common.local.setup.why_no_changes, common.local.setup.num_peers
        # A neighbour passes on the notes of all peers about any, and tells them again; the rate of an honest one is
        # bounded by the notes that peers accept of each other (`evaluations`).
        of_all = 50.0 + 4.0 * num_peers, 100.0 + 80.0 * num_peers
        passed_on = topics.EVALUATION, topics.RELEASE, topics.CLASSES, topics.CLASS_SHARES, topics.SHARE, topics.AVERAGE
        about_any = (*passed_on, LOST, TOLD)
        rates = {**_NOTES, **dict.fromkeys(about_any, of_all)}
        self._budgets = {
            topic: Allowances(rate=rate, burst=burst)
            for topic in self._notes
            for rate, burst in (rates.get(topic, _OTHER_NOTES),)
        }
        self._num_peers = num_peers
        """How many everybody lists."""

    def hear(self, peer: int, name: str) -> Neighbor | None:
        """Return how a caller is seen that is no neighbour: one that not everybody lists, or a member, which may owe
        frames to this peer of the time when it was a neighbour; None for any other. Raises HandshakeRefused."""
        if self._members.is_gone(peer):
            raise HandshakeRefused(f"{quote(name)} left or was declared lost; a lost one comes back by itself")
        if peer >= self._num_peers and self._why_no_changes is not None:
            raise HandshakeRefused(f"{quote(name)} is not in everybody's list, and {self._why_no_changes}")
        is_member = self._why_no_changes is None and self._members.standing(peer) in ("member", "joining")
        return self._roster.hear(peer, name, is_member=is_member)

    def link_up(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        """A neighbour is connected and has our frames up to `remote_has`; return what to send (again)."""
        frames = self._frames.frames_for(peer, remote_has)
        # Only now: a neighbour that cannot be gone on with, such as one whose state is too old, stays away.
        self._neighbors.up(peer, self._runtime.now())
        for topic, greeting in self._greetings.items():
            for note in greeting(peer):
                self._neighbors.transport.bulletin(peer, topic, note)
        self._runtime.wake()
        return frames

    def link_down(self, peer: int, reason: str) -> None:
        """A link ended; the transport dials again by itself."""
        self._frames.disconnected(peer)
        self._neighbors.down(peer, self._runtime.now())
        if self._loop.progress is not None:
            self._loop.progress.link_down()
        self._runtime.wake()

    def frame_received(self, peer: int, seq: int, frame: bytes) -> bool | None:
        """A whole frame came."""
        if not seq and frame.startswith(topics.CHUNK_MAGIC):
            self._average.frame_received(peer, frame)
            keeps_credit = None
        else:
            keeps_credit = self._frames.frame_received(peer, seq, frame)
        self._neighbors.frame_came(peer, self._runtime.now())
        self._runtime.wake()
        return keeps_credit

    def receipt(self, peer: int, upto: int) -> None:
        """A neighbour has our frames up to `upto` for good."""
        self._frames.receipt(peer, upto)
        self._runtime.wake()

    def last_received(self, peer: int) -> int:
        """Return the number of the last frame of a neighbour that need not be sent again."""
        return self._frames.last_received(peer)

    def bulletin_received(self, peer: int, topic: str, data: bytes) -> None:
        """A note came. One about anything that this version does not know is of no concern to it, and of too many at
        once the rest goes unread: a note may be lost at any time."""
        now = self._runtime.now()
        self._neighbors.heard(peer, now)
        judge = self._notes.get(topic)
        if judge is not None and self._budgets[topic].spend(peer, now):
            judge(peer, data)

    def goodbye(self, peer: int, reason: str) -> None:
        """A neighbour leaves on purpose: for good, if it is no member any more."""
        told = _GOODBYES.get(reason, f"says goodbye: {quote(reason, 240)}")
        self._neighbors.transport.log.write(log, logging.INFO, peer, "%s %s", self._roster.name(peer), told)
        self._neighbors.left[peer] = reason
        self._runtime.wake()
        if self._members.is_gone(peer):
            # Not from within a callback of the transport.
            asyncio.get_running_loop().call_soon(self._neighbors.transport.remove_neighbor, peer, "it left the run")

    async def control(self, verb: str, arguments: dict[str, object], caller: str) -> dict[str, object]:
        """An operator asks."""
        return await self._operator.control(verb, arguments, caller)
