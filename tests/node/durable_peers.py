"""A handful of durable peers in one process, with a network that delivers in order and processes that can end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np

from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.gossip import build
from peer.gossip.effects import Effects
from peer.gossip.late_neighbors import LatePolicy
from peer.gossip.options import LowRankOptions, RobustMixing
from peer.node.disk_state import PeerRecovery
from peer.node.durable import DurablePeer
from peer.node.participant import Participant
from peer.train.momentum import Momentum
from peer.wire.last_codes import LastCodes
from tests.gossip.drive import contexts, ring, schedule_of
from tests.node.local_steps import KeptSteps, OfScript, Step
from tests.state.failing_disk import FailingDisk

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
class World:
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
    disks: list[FailingDisk] = field(default_factory=list)
    peers: list[DurablePeer] = field(default_factory=list)
    recovered: list[PeerRecovery] = field(default_factory=list)
    now: float = 0.0
    sentences: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.disks = [FailingDisk() for _ in range(self.n)]
        self.links: dict[tuple[int, int], deque[tuple[float, int, bytes]]] = {}
        self.counts = [0] * self.n
        self.wake_at: list[float | None] = [None] * self.n
        """When each peer wants its timer called."""
        self.told_against_last = 0
        """Frames whose codes can only be read with those of the frame before."""

    def make(self, peer: int) -> DurablePeer:
        layout = Layout.of_shapes(SHAPES)
        node = contexts(schedule_of(ring(self.n)), layout, rounds=self.rounds, **self.settings[self.algorithm])[peer]
        participant = Participant(
            peer=peer,
            algorithm=build(self.algorithm, node, np.zeros(sum(SIZES), np.float32)),
            local_steps=(PullOfScript if self.is_script else Pull)(peer, self.wobble),
            layout=layout,
            max_lead=self.max_lead,
            late=self.late,
            last_codes=LastCodes(layout, np.float32, tells_changes=True)
            if self.algorithm.startswith("moniqua")
            else None,
            cpu_clock=lambda: 0.0,
        )
        return DurablePeer(
            participant,
            self.disks[peer],
            neighbors=[j for j in range(self.n) if j != peer],
            identity={"run": "test", "peer": str(peer)},
            durability=self.durability,  # type: ignore[arg-type]
            repeatable=self.repeatable,
        )

    def start(self) -> None:
        self.peers = [self.make(i) for i in range(self.n)]
        for peer in self.peers:
            peer.open()
        for i in range(self.n):
            self.connect(i)

    def restart(self, peer: int) -> PeerRecovery:
        """Start the process of a peer again, after it ended, and connect it to the others."""
        self.disks[peer].restart()
        self.peers[peer] = self.make(peer)
        recovery = self.peers[peer].open()
        self.wake_at[peer] = recovery.effects.wake_at
        self.recovered.append(recovery)
        self.connect(peer)
        return recovery

    def connect(self, one: int) -> None:
        """Let a peer and all others say hello; what was on its way on their old connections is gone."""
        for other in range(self.n):
            if other != one:
                for a, b in ((one, other), (other, one)):
                    self.links[a, b] = deque()
                    for seq, frame in self.peers[a].connected(b, self.peers[b].links.durable_from(a)):
                        self.links[a, b].append((0.0, seq, frame))

    def run(self) -> None:
        """Go on until every peer has done its rounds and nothing is on its way."""
        for _ in range(100_000):
            self.now += 1.0
            busy = [self.turn(i) for i in range(self.n)]
            if not any(busy) and not any(self.links.values()):
                return
        raise AssertionError([(p.round, p.participant.session.waiting_for) for p in self.peers])

    def turn(self, i: int) -> bool:
        """Let a peer do one thing; return whether it has something to do."""
        peer = self.peers[i]
        for (sender, receiver), waiting in self.links.items():
            if receiver == i and waiting and waiting[0][0] <= self.now:
                _, seq, frame = waiting.popleft()
                self.perform(i, peer.receive(sender, seq, frame, self.now))
                return True
        session = peer.participant.session
        if session.in_round:
            wake_at = self.wake_at[i]
            if wake_at is not None and self.now >= wake_at:
                self.perform(i, peer.timer(self.now))
            return True
        if peer.round == self.rounds:
            return False
        peer.step()
        self.perform(i, peer.begin(self.now))
        return True

    def perform(self, i: int, effects: Effects) -> None:
        peer = self.peers[i]
        self.wake_at[i] = effects.wake_at
        for outgoing in peer.publish(effects):
            self.counts[i] += 1
            self.told_against_last += bool(outgoing.frame[3] & 1 << 5)
            arrives_at = self.now + self.lag(i, self.counts[i])
            self.links[i, outgoing.receiver].append((arrives_at, outgoing.seq, outgoing.frame))
        self.confirm(i, effects.receipts)
        if effects.finished is not None:
            self.agree(i)
        if effects.finished is not None and (peer.round % self.save_every == 0 or peer.round == self.rounds):
            self.confirm(i, peer.save({"seconds": self.now}))
        elif effects.finished is not None and self.syncs:
            self.confirm(i, peer.sync())

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

    def confirm(self, i: int, receipts: Mapping[int, int]) -> None:
        for sender, upto in receipts.items():
            self.peers[sender].receipt(i, upto)

    def models(self) -> list[bytes]:
        return [peer.participant.algorithm.x.tobytes() for peer in self.peers]

    def operations(self, peer: int) -> Sequence[str]:
        return self.disks[peer].operations
