"""A run whose members change, in one process: production participants, every pair of them joined by two queues.

Which queue delivers next is drawn from a seed, so that peers run ahead of each other as far as their graph lets them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from peer import compress, gossip, wire
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.gossip.base import GraphNeed, NodeContext
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.gossip.topology import Schedule, build_schedule
from peer.gossip.views import ViewSchedule
from peer.notice import is_notice
from peer.participant import Participant, Turn
from peer.random import PhiloxSource

LAYOUT = Layout.of_sizes((7, 12, 1))
ROUNDS = 200


@dataclass
class Gradient:
    gradient: FloatArray
    loss: float = 0.0
    samples: int = 1


class Pull:
    """Local steps toward a point of the peer's own; none from `until` on."""

    def __init__(self, peer: int, until: int) -> None:
        self.goal = np.random.default_rng(peer).normal(size=LAYOUT.size).astype("f4")
        self.until = until
        self.steps: float = 0.0
        self.total = np.zeros(LAYOUT.size)

    needs_displacement = False

    def rate(self, t: int) -> float:
        return 0.1 if t < self.until else 0.0

    def gradient(self, z: FloatArray, t: int, rate: float, z_step: float) -> Gradient:
        gradient = (z - self.goal).astype("f4")
        self.total -= rate * gradient.astype(np.float64)
        return Gradient(gradient)

    def after_round(self, z_before: FloatArray, z_after: FloatArray, rate: float) -> None: ...

    def state(self) -> Mapping[str, npt.NDArray[Any]]:
        return {}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None: ...


@lru_cache(maxsize=256)
def _graph(kind: str, num_members: int, doubly: bool) -> Schedule:
    if num_members == 1:
        return Schedule.from_matrices([[[1.0]]])
    return build_schedule(num_members, kind, doubly=doubly)


@dataclass
class Cluster:
    algorithm: str
    kind: str
    num_first: int
    num_peers: int
    seed: int = 0
    gradients_until: int = 60
    peers: list[Participant] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        spec = gossip.ALGORITHMS[self.algorithm].spec
        self.push_sum = spec.push_sum
        doubly = spec.graph is GraphNeed.DOUBLY
        compressor = compress.build("top_k", fraction=0.4) if spec.compresses else compress.build("none")
        x0 = np.random.default_rng(99).normal(size=LAYOUT.size).astype("f4")
        self.queues: dict[tuple[int, int], deque[bytes]] = {}
        self.dead: set[int] = set()
        self.unreceived: dict[tuple[int, int], list[bytes]] = {}
        lead = (_graph(self.kind, self.num_first, doubly).diameter or self.num_peers) * _graph(
            self.kind, self.num_first, doubly
        ).cycle_rounds + 1
        for peer in range(self.num_peers):
            views = ViewSchedule(
                self.num_peers,
                Membership(range(self.num_first)),
                lambda members: _graph(self.kind, len(members), doubly),
            )
            node = NodeContext(
                peer=peer,
                schedule=views,
                layout=LAYOUT,
                draw_source=PhiloxSource(7, peer),
                compressor=compressor,
                averaging_rate=0.3 if spec.compresses else 1.0,
                rounds=ROUNDS,
            )
            self.peers.append(
                Participant(
                    peer=peer,
                    algorithm=gossip.build(self.algorithm, node, x0),
                    local_steps=Pull(peer, self.gradients_until),
                    layout=LAYOUT,
                    max_lead=lead,
                )
            )

    def perform(self, peer: int, turn: Turn) -> None:
        for parcel in turn.parcels:
            if parcel.receiver in self.dead:
                self.unreceived.setdefault((peer, parcel.receiver), []).append(parcel.frame)
            else:
                self.queues.setdefault((peer, parcel.receiver), deque()).append(parcel.frame)
        if turn.news is not None:
            for lost in self.peers[peer].to_lose:
                self.perform(peer, self.peers[peer].lose(lost, self.unreceived.pop((peer, lost), []), 0.0))

    def announce(self, peer: int, kind: ChangeKind, subject: int) -> Change:
        change = self.peers[peer].plan(kind, subject)
        self.perform(peer, self.peers[peer].learn(change, 0.0))
        return change

    def kill(self, peer: int) -> None:
        """End a peer at once; what is on its way to it is lost, what is on its way from it comes."""
        self.dead.add(peer)
        for sender in range(self.num_peers):
            self.unreceived[sender, peer] = list(self.queues.pop((sender, peer), ()))

    def run(self, upto: int) -> None:
        """Run until every member that lives has completed `upto` rounds, or nothing moves any more."""
        while True:
            able = [
                p.peer
                for p in self.peers
                if p.peer not in self.dead and p.is_member and not p.session.in_round and p.round < upto
            ]
            waiting = [pair for pair, queue in self.queues.items() if queue]
            if not able and not waiting:
                return
            if able and (not waiting or self.random.random() < 0.3):
                participant = self.peers[self.random.choice(able)]
                participant.step()
                self.perform(participant.peer, participant.begin(0.0))
            else:
                sender, receiver = self.random.choice(waiting)
                frame = self.queues[sender, receiver].popleft()
                self.perform(receiver, self.peers[receiver].receive(sender, frame, 0.0))

    @property
    def members(self) -> list[Participant]:
        return [p for p in self.peers if p.peer not in self.dead and p.is_member]

    def mass(self) -> tuple[npt.NDArray[np.float64], float]:
        """Return Σx and Σu of the members."""
        x = sum((p.algorithm.x.astype(np.float64) for p in self.members), np.zeros(LAYOUT.size))
        return x, sum(p.algorithm.u for p in self.members)

    def gradients(self) -> npt.NDArray[np.float64]:
        """Return by how much Σx moved by local steps of all peers."""
        return sum((p.local_steps.total for p in self.peers), np.zeros(LAYOUT.size))  # type: ignore[attr-defined]


def weight_of(frame: bytes) -> float:
    """Return the push weight that a frame carries: W u of its round."""
    if is_notice(frame):
        return 0.0
    message = wire.decode(frame, LAYOUT)
    return message.mixing_weight * message.push_weight
