"""A handful of durable peers in one process, with a network that delivers in order and processes that can end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.gossip.effects import Effects
from peer.gossip.late_neighbors import LatePolicy
from peer.gossip.options import LowRankOptions, RobustMixing
from peer.node.durable import DurablePeer
from peer.train.momentum import Momentum
from tests.cluster import Rounds
from tests.gossip.drive import contexts, ring, schedule_of
from tests.node.local_steps import KeptSteps, OfScript, Step
from tests.peers import durable, participant

SHAPES = [(5, 8), (23,)]
SIZES = [40, 23]
TOP = ("top_k", {"fraction": 0.2, "value_bits": 4})
MODULO = ("modulo", {"bits": 6, "rounding": "dither", "verified": True})
ALGORITHMS: dict[str, dict[str, Any]] = {
    "sparse-push": {"compressor": TOP, "averaging_rate": 0.1},
    "quant-sgp": {"compressor": TOP, "averaging_rate": 0.2},
    "choco-sgd": {"compressor": TOP, "averaging_rate": 0.2},
    "d-psgd": {"robust": RobustMixing(rule="clipped")},
    "d2": {"averaging_rate": 0.5},
    "allreduce": {},
    "low-rank": {"low_rank": LowRankOptions(rank=1), "momentum": partial(Momentum, "nesterov")},
    "compressed-allreduce": {"compressor": TOP, "momentum": partial(Momentum, "nesterov")},
    # A θ that is too small at first: there are repairs.
    "moniqua": {
        "compressor": MODULO, "averaging_rate": 0.3, "verified": True, "theta": (0.3,),
    },
}  # fmt: skip
LATE = LatePolicy(after_s=1.5, max_skipped=2)
ADAPTIVE = LatePolicy(after_s=4.0, max_skipped=3, adaptive=True)
SILENT = LatePolicy(after_s=1.5, max_skipped=4, silent_after_s=2.5)
"""Leaves out who confirms nothing, besides."""


class Pull(KeptSteps):
    """Pull toward a target, with a momentum to be saved; `wobble` makes that unrepeatable."""

    def __init__(self, peer: int, wobble: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(np.zeros(sum(SIZES), np.float32))
        self.target = np.random.default_rng(peer).normal(size=sum(SIZES)).astype(np.float32)
        self.wobble = wobble

    def rate(self, t: int) -> float:
        return 0.05

    def gradient(self, z: FloatArray, t: int, rate: float, z_step: float) -> Step:
        self.kept *= np.float32(0.5)
        self.kept += z - self.target * np.float32(1.0 + t % 3 + self.wobble())
        return Step(self.kept)


class PullOfScript(OfScript, Pull):
    """The same, done by a script."""


@dataclass
class World(Rounds):
    """`rounds` rounds of one algorithm on a ring."""

    settings: ClassVar[Mapping[str, dict[str, Any]]] = ALGORITHMS
    algorithm: str
    n: int = 3
    rounds: int = 7
    save_every: int = 3
    late: LatePolicy | None = None
    durability: str = "process"
    syncs: bool = True
    """Whether every round is synced after it, so that neighbours may forget it."""
    max_lead: int = 20
    lag: Callable[[int, int], int] = lambda sender, number: 0
    """How many turns of everybody a frame stays on its way, by sender and its own count of frames."""
    repeatable: bool = True
    is_script: bool = False
    wobble: Callable[[], float] = lambda: 0.0

    def __post_init__(self) -> None:
        super().__init__(self.n, 0, self.rounds)
        self.counts = [0] * self.n
        self.sentences: list[str] = []
        self.told_against_last = 0
        """Frames whose codes can only be read with those of the frame before."""

    def make(self, peer: int) -> DurablePeer:
        layout = Layout.of_shapes(SHAPES)
        node = contexts(schedule_of(ring(self.n)), layout, rounds=self.rounds, **self.settings[self.algorithm])[peer]
        steps = (PullOfScript if self.is_script else Pull)(peer, self.wobble)
        made = participant(
            self.algorithm, node, np.zeros(sum(SIZES), np.float32), steps, max_lead=self.max_lead, late=self.late
        )
        return durable(made, self.disks[peer], self.n, durability=self.durability, repeatable=self.repeatable)

    def run(self) -> None:
        """Go on until every peer has done its rounds and nothing is on its way."""
        for _ in range(100_000):
            self.now += 1.0
            busy = [self.turn(me) for me in self.peers]
            if not any(busy) and not any(self.queues.values()):
                return
        raise AssertionError([(p.round, p.participant.session.waiting_for) for p in self.peers.values()])

    def arrival(self, sender: int, frame: bytes) -> float:
        self.counts[sender] += 1
        self.told_against_last += bool(frame[3] & 1 << 5)
        return self.now + self.lag(sender, self.counts[sender])

    def after(self, me: int, effects: Effects) -> None:
        if effects.finished is None:
            return
        self.agree(me)
        peer = self.peers[me]
        if peer.round % self.save_every == 0 or peer.round == self.rounds:
            self.confirm(me, peer.save({"seconds": self.now}))
        elif self.syncs:
            self.confirm(me, peer.sync())

    def agree(self, i: int) -> None:
        """Tell the others what their copies of a peer should be, and let it ask for what differs in its own."""
        peer = self.peers[i]
        digests = peer.participant.agreement.own_digests()
        for other in range(self.n):
            if other != i and digests is not None:
                self.peers[other].participant.agreement.hear(i, *digests)
        effects, sentences = peer.participant.check_replicas()
        self.sentences += sentences
        self.perform(i, effects)

    def models(self) -> list[bytes]:
        return [peer.participant.algorithm.x.tobytes() for peer in self.peers.values()]

    def operations(self, peer: int) -> Sequence[str]:
        return self.disks[peer].operations
