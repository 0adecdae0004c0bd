"""Whether the replicas that peers keep of each other still agree: digests go round, and differing layers are asked
for. Whether scripts that average gradients still hold one model: sketches of the models go round."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from peer.daemon.neighbors import Neighbors
from peer.daemon.notes import notes
from peer.daemon.round_frames import RoundFrames
from peer.daemon.runtime import Runtime
from peer.errors import RemoteProtocolError
from peer.net.handler import MAX_BULLETIN_BYTES
from peer.node.participant import Participant

log = logging.getLogger("sotto")

_COMPARED_EVERY = 64
"""Rounds between two comparisons of models."""
_OTHER_STEPS = 0.01
"""Distance of two models, in what one has moved since the last comparison, beyond which their optimizers took other
steps."""
_ROUNDED = 1e-5
"""Distance, in the length of a model, that comes of processors which round differently."""


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


class ModelCheck:
    """Compares the models of devices whose scripts take the same steps by the same mean gradients.

    Processors of different kinds round an optimizer's step differently, so that digests would differ. Told are the
    products of each layer with random signs, the same on all devices: the squares of their differences add up, on
    average, to the squared distance of two models. Another's word ends no peer: a difference is told, and the operator
    decides.
    """

    def __init__(
        self, runtime: Runtime, neighbors: Neighbors, participant: Participant, name: Callable[[int], str]
    ) -> None:
        """`name` returns that of a peer."""
        self._runtime, self._neighbors, self._participant, self._name = runtime, neighbors, participant, name
        self._before, self._own = self._sketch(), (-1, np.zeros(0))
        # Behind a restart, only a whole interval says how far a model moves.
        self._is_whole = participant.round % _COMPARED_EVERY == 0
        self._heard: dict[int, tuple[int, npt.NDArray[np.float64]]] = {}
        self._told: set[int] = set()

    async def after_round(self, round_: int) -> None:
        """Tell the others this peer's sketch, and compare theirs with it."""
        if (round_ + 1) % _COMPARED_EVERY:
            return
        sketch = await self._runtime.work(self._sketch)
        if self._own[1].size:
            self._before, self._is_whole = self._own[1], True
        self._own = round_, sketch
        note = notes.encode_digests(round_, self._own[1].view(np.uint64).tolist())
        if len(note) <= MAX_BULLETIN_BYTES:
            self._neighbors.broadcast(notes.REPLICA, note, None)
        for peer in self._heard:
            self._compare(peer)

    def heard(self, peer: int, note: bytes) -> None:
        """Compare a neighbour's sketch. Raises RemoteProtocolError for a malformed note."""
        node = self._participant.algorithm.node
        round_, words = notes.decode_digests(note, node.rounds, node.layout.num_layers)
        sketch = np.array(words, np.uint64).view(np.float64)
        if not np.isfinite(sketch).all():
            raise RemoteProtocolError("told a sketch of its model with numbers that are not finite", peer=peer)
        self._heard[peer] = round_, sketch
        self._compare(peer)

    def _compare(self, peer: int) -> None:
        (round_, theirs), (own_round, own) = self._heard[peer], self._own
        if round_ != own_round or not self._is_whole or peer in self._told:
            return
        apart, moved, length = (float(np.linalg.norm(each)) for each in (theirs - own, own - self._before, own))
        if apart > max(_OTHER_STEPS * moved, _ROUNDED * length):
            self._told.add(peer)
            log.warning(
                "the model of %s is away from this one after %d steps, by %.2g of what this one has moved in the last"
                " %d: its script takes other steps by the same mean gradients. Compare optimizer, learning rate,"
                " clipping and decay of the two, and start the run anew",
                self._name(peer),
                round_ + 1,
                apart / max(moved, 1e-300),
                _COMPARED_EVERY,
            )

    def _sketch(self) -> npt.NDArray[np.float64]:
        algorithm = self._participant.algorithm
        draws, slices = algorithm.node.draw_source.draws(0), algorithm.node.layout.slices
        return np.array(
            [
                np.copysign(1.0, draws.shared(layer, part.stop - part.start, np.float32) - 0.5)
                @ algorithm.x[part].astype(np.float64)
                for layer, part in enumerate(slices)
            ]
        )
