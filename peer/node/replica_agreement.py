"""Comparison of the replicas that peers keep of each other, and repair of those that differ.

Algorithms with replicas send differences only, so that a replica that was ever changed by anything else (a bit of
memory, a defect) would stay wrong for the rest of the run. Now and then a peer tells the digests of its layers to those
that keep a replica of it; if theirs differ, they ask for the layers concerned, whole.
"""

from __future__ import annotations

from collections.abc import Collection

from peer.errors import RemoteProtocolError
from peer.gossip.base import Algorithm
from peer.gossip.effects import Send
from peer.gossip.replicas import Digests, replicas_of
from peer.wire.message import Message, MessageKind, RepairWish


class ReplicaAgreement:
    """One peer's part in comparing replicas. Peers whose algorithm keeps none have nothing to say or to compare."""

    def __init__(self, algorithm: Algorithm, *, members_change: bool) -> None:
        self._algorithm, self._members_change = algorithm, members_change
        self._replicas = replicas_of(algorithm)
        self.repairs = 0
        """Layers that differed so far."""
        self._claims: dict[int, tuple[int, Digests]] = {}
        """Neighbour → (round, digests) that, by its word, the replica of it here should have."""
        self._asked: dict[int, set[int]] = {}
        """Neighbour → layers of its replica that were asked for."""

    def own_digests(self) -> tuple[int, Digests] | None:
        """Return (round, digest of each layer) of the last check of this peer's replica, to be told after the round to
        those that keep it, for `hear`. None if nobody keeps one."""
        return None if self._replicas is None else self._replicas.own_digests

    def keepers(self) -> tuple[int, ...]:
        """Return the peers that keep a replica of this one now, ascending."""
        return () if self._replicas is None else self._replicas.receivers

    def hear(self, sender: int, round_: int, digests: Digests) -> None:
        """Note the digests that a neighbour's replica should have after its message of a round."""
        self._claims[sender] = (round_, digests)

    @property
    def has_heard(self) -> bool:
        """Whether `compare` has anything to do."""
        return bool(self._claims)

    def compare(self) -> tuple[list[Send], list[str]]:
        """Compare the replicas with the digests heard, between rounds; return requests for the layers that differ, and
        a sentence on each neighbour concerned. A request that is lost is made again after the next check."""
        sends, sentences = [], []
        for sender, (round_, digests) in list(self._claims.items()):
            try:
                layers = self._differing_layers(sender, round_, digests)
            except RemoteProtocolError as error:
                del self._claims[sender]
                sentences.append(str(error))
                continue
            if layers is None:
                continue  # Its message of that round is still to come: compared when it has.
            del self._claims[sender]
            if layers:
                self.repairs += len(layers)
                self._asked.setdefault(sender, set()).update(layers)
                wishes = tuple(RepairWish(layer, 0, 0) for layer in layers)
                me = self._algorithm.node.peer
                sends.append(Send(sender, Message(MessageKind.REPAIR_REQUEST, me, round_, wanted=wishes)))
                sentences.append(self._sentence(sender, round_, layers))
        return sends, sentences

    def has_asked(self, sender: int, layers: Collection[int]) -> bool:
        """Whether these layers of a neighbour were asked for and have not come yet."""
        return sender in self._asked and self._asked[sender].issuperset(layers)

    def answered(self, sender: int) -> None:
        """Note that a repair of a neighbour came."""
        self._asked.pop(sender, None)

    def _differing_layers(self, sender: int, round_: int, digests: Digests) -> tuple[int, ...] | None:
        if self._replicas is None or (self._members_change and sender not in self._replicas.senders):
            return ()  # The edge between us is gone, or not there yet.
        return self._replicas.compare(sender, round_, digests)

    def _sentence(self, sender: int, round_: int, layers: tuple[int, ...]) -> str:
        layout = self._algorithm.node.layout
        names = ", ".join(layout.names[layer] for layer in layers[:3]) + (", …" if len(layers) > 3 else "")
        return (
            f"the copy of peer {sender} differed from its own after round {round_} in {len(layers)} of "
            f"{layout.num_layers} layers ({names}); they are asked for"
        )
