"""What a seed stands for: algorithm, graph, compressor, lateness, and the run that nothing disturbs."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from peer import compress, gossip
from peer.compress.bound import BoundedCompressor
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.gossip.base import Algorithm, AlgorithmSpec, GraphNeed, NodeContext
from peer.gossip.session import LatePolicy
from peer.gossip.topology import Schedule, build_schedule
from peer.participant import Participant
from peer.random import PhiloxSource
from peer.simulate.faults.training import VirtualTraining
from peer.wire.last_codes import LastCodes

_SIZES = ((16, 5), (12, 3, 9), (30,), (7, 1, 1, 20))
"""Layers of the models."""

_COMPRESSORS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("top_k", {"fraction": 0.2}),
    ("top_k", {"fraction": 0.2, "value_bits": 4}),
    ("random_k", {"fraction": 0.25}),
    ("qsgd", {"bits": 3}),
    ("sign", {}),
    ("none", {}),
)

_GRAPHS_DOUBLY = ("ring", "complete", "line")
_GRAPHS_COLUMN = ("directed-ring", "exponential", "exponential-one-peer", "directed-erdos-renyi", "ring")


@dataclass(frozen=True)
class Case:
    """One row of what is simulated."""

    algorithm: str
    late: bool = False
    """Whether peers go on without late neighbours (`rounds.late = "skip"`)."""
    verified: bool = False
    theta: float = 0.0
    bits: int = 8


CASES = (
    Case("sgp"),
    Case("sparse-push"),
    Case("scsp"),
    Case("quant-sgp"),
    Case("choco-sgd"),
    Case("moniqua", verified=True, theta=2.0),
    # A first θ far too small: rounds need repairs, and those may be cut off too.
    Case("moniqua", verified=True, theta=1e-3, bits=4),
    Case("d2"),
    Case("moniqua-d2", verified=True, theta=2.0),
    Case("deep-squeeze"),
    Case("dcd-psgd"),
    Case("ecd-psgd"),
    Case("sgp", late=True),
    Case("sparse-push", late=True),
    Case("scsp", late=True),
    Case("quant-sgp", late=True),
)


@dataclass(frozen=True)
class RoundState:
    """A peer after a round, as far as it can be compared."""

    x: npt.NDArray[np.float64]
    u: float
    digest: bytes
    """Of everything that the next rounds depend on."""


@dataclass(frozen=True)
class Scenario:
    """One job, a function of its seed."""

    seed: int
    rounds: int = 100

    @cached_property
    def case(self) -> Case:
        return CASES[self.seed % len(CASES)]

    @cached_property
    def num_peers(self) -> int:
        return 4 if self._graph_kind.startswith("four-node") else Random(f"peers {self.seed}").choice((3, 4, 4, 5))

    @cached_property
    def _graph_kind(self) -> str:
        random = Random(f"graph {self.seed}")
        if self.spec.graph is GraphNeed.COLUMN:
            return random.choice((*_GRAPHS_COLUMN, "four-node-a"))
        return random.choice(_GRAPHS_DOUBLY)

    @property
    def spec(self) -> AlgorithmSpec:
        return gossip.ALGORITHMS[self.case.algorithm].spec

    @cached_property
    def layout(self) -> Layout:
        return Layout.of_sizes(Random(f"layout {self.seed}").choice(_SIZES))

    @cached_property
    def schedule(self) -> Schedule:
        kind = self._graph_kind
        kinds = ("four-node-a", "four-node-b", "four-node-c") if kind == "four-node-a" else (kind,)
        doubly = self.spec.graph in (GraphNeed.DOUBLY, GraphNeed.SYMMETRIC)
        return _schedule(self.num_peers, kinds, doubly, self.seed % 8)

    @cached_property
    def compressor(self) -> BoundedCompressor:
        if not self.spec.compresses:
            return compress.build("none")
        if self.spec.modulo:
            return compress.build("modulo", bits=self.case.bits, verified=self.case.verified)
        kind, settings = Random(f"compressor {self.seed}").choice(_COMPRESSORS)
        if kind == "sign" and self.spec.needs_unbiased:
            kind, settings = "qsgd", {"bits": 4}
        if kind in ("qsgd", "random_k"):
            settings = {**settings, "unbiased": self.spec.needs_unbiased}
        if kind == "top_k" and self.spec.needs_unbiased:
            kind, settings = "random_k", {"fraction": 0.5, "unbiased": True}
        return compress.build(kind, **settings)

    @cached_property
    def late_policy(self) -> LatePolicy | None:
        if not self.case.late:
            return None
        return LatePolicy(after_s=0.05, max_skipped=5, adaptive=Random(f"deadlines {self.seed}").random() < 0.5)

    @cached_property
    def max_lead(self) -> int:
        """How many rounds an in-neighbour can be ahead: as `job.Job.max_lead`."""
        lead = (self.schedule.diameter or self.num_peers) * max(1, self.schedule.cycle_rounds)
        skipped = 0 if self.late_policy is None else self.late_policy.max_skipped + 1
        return lead + skipped * lead + 1

    @cached_property
    def averaging_rate(self) -> float:
        if self.case.algorithm in ("d2", "moniqua-d2"):
            return 0.5
        if self.spec.modulo:
            return 0.5
        return 1.0 if not self.spec.compresses or self.compressor.kind == "none" else 0.2

    @property
    def conserves_sum(self) -> bool:
        """Whether Σx moves by the gradient steps alone. DCD and ECD keep it on average over the draws only: what they
        average is the replicas, and those lack what the compressor left out."""
        return self.case.algorithm not in ("dcd-psgd", "ecd-psgd")

    @cached_property
    def x0(self) -> FloatArray:
        """Where all peers start: float32[n]."""
        return np.random.Generator(np.random.Philox([self.seed, 1 << 20])).normal(size=self.layout.size).astype("f4")

    def participant(
        self,
        peer: int,
        *,
        on_step: Callable[[int, float, FloatArray], None],
        observe: Callable[[str, int, int, bytes], None] | None = None,
    ) -> Participant:
        """Return one peer, ready for round 0."""
        final = min(10, self.rounds // 4) if self.case.algorithm == "scsp" else 0
        node = NodeContext(
            peer=peer,
            schedule=self.schedule,
            layout=self.layout,
            draw_source=PhiloxSource(self.seed, peer),
            compressor=self.compressor,
            averaging_rate=self.averaging_rate,
            push_weight_guard=0.5 if self.case.late else 0.0,
            rounds=self.rounds,
            final_rounds=final,
            theta=(self.case.theta,),
            verified=self.case.verified,
            settings={"seed": self.seed, "theta_mode": "verified" if self.case.verified else "constant"},
        )
        training = VirtualTraining(
            self.layout.size,
            self.rounds,
            seed=self.seed,
            peer=peer,
            quasi_global=self.seed % 3 == 1 and self.spec.graph is not GraphNeed.SYMMETRIC,
            on_step=on_step,
        )
        return Participant(
            peer=peer,
            algorithm=gossip.build(self.case.algorithm, node, self.x0),
            local_steps=training,
            layout=self.layout,
            max_lead=self.max_lead,
            late=self.late_policy,
            last_codes=LastCodes(self.layout, np.float32, tells_changes=True) if self.spec.modulo else None,
            observe=observe,
            cpu_clock=_no_time,
            stopwatch=_no_time,
        )

    def undisturbed(self) -> list[list[RoundState]]:
        """Return what every peer's state is after every round where all messages come at once: [peer][round]."""
        peers = [self.participant(peer, on_step=_ignore_step) for peer in range(self.num_peers)]
        states: list[list[RoundState]] = [[] for _ in peers]
        for t in range(self.rounds):
            inbound: deque[tuple[int, int, bytes]] = deque()
            for participant in peers:
                participant.step()
            for participant in peers:
                turn = participant.begin(0.0)
                inbound += [(parcel.receiver, participant.peer, parcel.frame) for parcel in turn.parcels]
            while inbound:
                receiver, sender, frame = inbound.popleft()
                turn = peers[receiver].receive(sender, frame, 0.0)
                inbound += [(parcel.receiver, receiver, parcel.frame) for parcel in turn.parcels]
            for participant in peers:
                assert participant.round == t + 1, f"peer {participant.peer} did not end round {t}"
                states[participant.peer].append(state_of(participant))
        return states


def state_of(participant: Participant) -> RoundState:
    """Return what is compared of a peer between two rounds."""
    algorithm: Algorithm = participant.algorithm
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted({**algorithm.state(), **participant.local_steps.state()}.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return RoundState(algorithm.x.astype(np.float64), algorithm.u, digest.digest())


@lru_cache(maxsize=64)
def _schedule(num_peers: int, kinds: tuple[str, ...], doubly: bool, seed: int) -> Schedule:
    return build_schedule(num_peers, kinds, period_rounds=1 + seed % 3, probability=0.6, seed=seed, doubly=doubly)


def _no_time() -> float:
    return 0.0


def _ignore_step(round_: int, rate: float, gradient: FloatArray) -> None:
    pass
