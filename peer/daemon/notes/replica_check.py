"""Whether the replicas that peers keep of each other still agree: digests go round, and differing layers are asked
for."""

from __future__ import annotations

import logging

from peer.daemon.neighbors import Neighbors
from peer.daemon.notes import notes
from peer.daemon.round_frames import RoundFrames
from peer.daemon.runtime import Runtime
from peer.net.handler import MAX_BULLETIN_BYTES
from peer.node.participant import Participant

log = logging.getLogger("sotto")


class ReplicaCheck:
    """Checks the replicas of one peer: those that others keep of it, and those that it keeps of them."""

    def __init__(self, runtime: Runtime, neighbors: Neighbors, participant: Participant, frames: RoundFrames) -> None:
        self._runtime, self._neighbors, self._frames = runtime, neighbors, frames
        self._participant, self._agreement = participant, participant.agreement

    async def after_round(self, round_: int) -> None:
        """Tell the keepers of this peer's replicas their proper digests, and ask for differing layers of those kept
        here."""
        own = self._agreement.own_digests()
        if own is not None and own[0] == round_:
            note = notes.encode_digests(round_, own[1])
            for peer in self._agreement.keepers() if len(note) <= MAX_BULLETIN_BYTES else ():
                self._neighbors.transport.bulletin(peer, notes.REPLICA, note)
        if self._agreement.has_heard:
            effects, sentences = await self._runtime.work(self._participant.check_replicas)
            for sentence in sentences:
                log.warning("%s", sentence)
            self._frames.perform(effects)

    def heard(self, peer: int, note: bytes) -> None:
        """Judge a neighbour's digests of its replica here. Raises RemoteProtocolError for a malformed note."""
        node = self._participant.algorithm.node
        self._agreement.hear(peer, *notes.decode_digests(note, node.rounds, node.layout.num_layers))
