"""What peers of tests are made of: graphs, compressors, local steps that train nothing, participants without clocks."""

from __future__ import annotations

from functools import lru_cache, partial
from math import inf
from typing import Any

import numpy as np

from peer import compress, gossip
from peer.compress.base import Compressor
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.errors import SecurityError
from peer.gossip.base import AlgorithmSpec, NodeContext
from peer.gossip.membership import Newcomer
from peer.gossip.options import LowRankOptions, ModuloOptions
from peer.gossip.topology import Schedule, build_schedule
from peer.gossip.views import ViewSchedule
from peer.node.disk_state import DiskState, Durability
from peer.node.durable import DurablePeer
from peer.node.durable_pair import DurablePair
from peer.node.local_steps import LocalSteps
from peer.node.pair_participant import PairParticipant
from peer.node.participant import Participant
from peer.random import PhiloxSource
from peer.state.disk import Disk
from peer.train.momentum import Momentum
from peer.wire.last_codes import LastCodes
from tests.node.local_steps import KeptSteps, OfScript, Step


class Approach(KeptSteps):
    """Local steps toward a goal, and their sum; none from round `until` on."""

    def __init__(self, goal: FloatArray, until: float = inf) -> None:
        super().__init__(np.zeros(goal.size))
        self.goal, self.until = goal, until

    def rate(self, t: int) -> float:
        return 0.1 if t < self.until else 0.0

    def gradient(self, z: FloatArray, t: int, rate: float, z_step: float) -> Step:
        gradient = (z - self.goal).astype("f4")
        # After a lie the difference may be of any size; what is tested is not the arithmetic of this class.
        with np.errstate(all="ignore"):
            self.kept -= rate * gradient.astype(np.float64)
        return Step(gradient)


class ApproachOfScript(OfScript, Approach):
    """The same, done by a script."""


def drawn(seed: int, size: int) -> FloatArray:
    """Return a model: float32[size]."""
    return np.random.default_rng(seed).normal(size=size).astype("f4")


@lru_cache(maxsize=256)
def graph(kind: str, num_members: int, doubly: bool) -> Schedule:
    """Return a graph that one member may have alone."""
    if num_members == 1:
        return Schedule.from_matrices([[[1.0]]])
    return build_schedule(num_members, kind, doubly=doubly)


def compressor_of(spec: AlgorithmSpec, *, bits: int = 7, verified: bool = True) -> Compressor:
    """Return a compressor that an algorithm may run with; `bits` of levels without bias."""
    if spec.modulo:
        return compress.build("modulo", bits=8, verified=verified)
    if spec.needs_unbiased:
        return compress.build("qsgd", bits=bits, unbiased=True)
    return compress.build("top_k", fraction=0.4) if spec.compresses else compress.build("none")


def node(
    algorithm: str,
    peer: int,
    schedule: Schedule | ViewSchedule,
    layout: Layout,
    *,
    theta: float,
    verified: bool = True,
    **more: Any,
) -> NodeContext:
    """Return what an algorithm is made from; `more` as for `NodeContext`. `verified`: whether codes tell whether they
    were read right, after which θ is adapted."""
    spec = gossip.ALGORITHMS[algorithm].spec
    fields: dict[str, Any] = {
        "draw_source": PhiloxSource(7, peer),
        # D² needs eigenvalues above −1/3.
        "averaging_rate": spec.default_averaging_rate or (0.3 if spec.compresses else 1.0),
        "modulo": ModuloOptions(theta=(theta,), theta_mode="verified" if verified else "constant", verified=verified),
        "low_rank": LowRankOptions(rank=1),
        "momentum": partial(Momentum, "nesterov"),
    }
    return NodeContext(peer=peer, schedule=schedule, layout=layout, **fields | more)


def participant(algorithm: str, node: NodeContext, start: FloatArray, steps: LocalSteps, **more: Any) -> Participant:
    """Return a participant of an algorithm with rounds; `more` as for `Participant`."""
    has_codes = node.compressor.kind == "modulo" and node.modulo.verified
    return Participant(
        peer=node.peer,
        algorithm=gossip.build(algorithm, node, start),
        local_steps=steps,
        layout=node.layout,
        last_codes=LastCodes(node.layout, np.float32, tells_changes=True) if has_codes else None,
        cpu_clock=_no_time,
        stopwatch=_no_time,
        **more,
    )


def durable(
    participant: Participant, disk: Disk, numbers: int, *, durability: Durability = "process", **more: Any
) -> DurablePeer:
    """Return a peer that is listed with so many others, not opened yet; `more` as for `DurablePeer`."""
    me = participant.peer
    others = [other for other in range(numbers) if other != me]
    return DurablePeer(participant, _kept(disk, me, durability), neighbors=others, **more)


def _kept(disk: Disk, me: int, durability: Durability) -> DiskState:
    return DiskState(disk, {"run": "run", "peer": str(me)}, durability=durability)


def durable_pair(
    algorithm: str,
    node: NodeContext,
    start: FloatArray,
    steps: LocalSteps,
    disk: Disk,
    *,
    durability: Durability = "process",
) -> DurablePair:
    """Return a peer of an algorithm without rounds, not opened yet."""
    participant = PairParticipant(
        algorithm=gossip.build_pair_node(algorithm, node, start),
        local_steps=steps,
        cpu_clock=_no_time,
        stopwatch=_no_time,
    )
    return DurablePair(participant, _kept(disk, node.peer, durability))


def newcomer(peer: int) -> Newcomer:
    """Return what a newcomer says of itself."""
    return Newcomer(f"peer-{peer}", f"192.0.2.{peer % 200}:7700", None, b"signed for %d" % peer)


def check_newcomer(peer: int, said: Newcomer) -> None:
    """Stands for the check of a certificate: what it says is signed for this device alone."""
    if said != newcomer(peer):
        raise SecurityError("the certificate is another peer's")


def _no_time() -> float:
    return 0.0
