"""What a seed stands for: algorithm, graph, compressor, lateness, and who joins, leaves and is lost."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from peer import compress, gossip
from peer.compress.base import Compressor
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.errors import ConfigError, SecurityError
from peer.gossip.base import Algorithm, AlgorithmSpec, GraphNeed, NodeContext
from peer.gossip.drift import default_gain
from peer.gossip.incarnations import Numbering
from peer.gossip.late_neighbors import LatePolicy
from peer.gossip.membership import ChangeKind, Membership, Newcomer
from peer.gossip.options import FinalRounds, LowRankOptions, ModuloOptions
from peer.gossip.topology import Schedule, build_schedule
from peer.gossip.views import ViewSchedule
from peer.node.membership import MembershipRules
from peer.node.participant import Participant
from peer.node.statements import Statements
from peer.random import PhiloxSource
from peer.train.momentum import Momentum
from tests.peers import participant
from tests.stress.faults.training import VirtualTraining

_SIZES = ((16, 5), (12, 3, 9), (30,), (7, 1, 1, 20))
_SHAPES = (((4, 4), (5,)), ((12,), (3, 3), (9,)), ((5, 6),), ((7,), (1,), (1,), (3, 2, 4)))
"""Layers of the models; shapes for algorithms that see matrices in them."""

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
    corrects_drift: bool = False
    in_bfloat16: bool = False


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


BY_NAME = {
    **{name: Case(name) for name in ("low-rank", "compressed-allreduce")},
    "drift": Case("quant-sgp", corrects_drift=True),
    "bfloat16": Case("quant-sgp", in_bfloat16=True),
    "sums in bfloat16": Case("compressed-allreduce", in_bfloat16=True),
}
"""Cases that no seed stands for: scenarios name them, so that seeds keep what they stood for before."""


@dataclass(frozen=True)
class Happening:
    """Something that befalls the members. What comes of it the peers decide: from which round it counts, and whether
    it can be at all."""

    kind: ChangeKind
    subject: int
    at_round: int
    """As soon as anyone has done so many rounds."""
    is_alive: bool = False
    """Of a peer that is given up for lost: whether it lives on, cut off from all others. One that lies stays linked to
    them, says nothing any more that they can take, and is removed once somebody has refused that."""


@dataclass(frozen=True)
class RoundState:
    """A peer after a round, as far as it can be compared."""

    x: npt.NDArray[np.float64]
    u: float
    digest: bytes
    """Of everything that the next rounds depend on."""


@dataclass(frozen=True)
class Scenario:
    """One run, a function of its seed."""

    seed: int
    rounds: int = 100
    lies: bool = False
    """Whether one of the members lies. It tells no lie to a newcomer that is no member yet: that one has nothing to
    judge by, and believes whoever is the first to tell it of members, so that nothing can be promised of it."""
    name: str | None = None
    """Of one of the cases in `BY_NAME`; None: the seed decides."""

    @cached_property
    def liar(self) -> int | None:
        """Who lies; None if nobody does."""
        return Random(f"liar {self.seed}").randrange(self.num_first) if self.lies else None

    @cached_property
    def is_two_faced(self) -> bool:
        """Whether the liar tells each neighbour of another model: where the auditor can count what that brings it."""
        additive = self.case.algorithm in ("sgp", "sparse-push", "scsp", "deep-squeeze")
        return self.lies and additive and Random(f"two-faced {self.seed}").random() < 0.5

    @cached_property
    def has_budgets(self) -> bool:
        """Whether peers wait before a round, as for a bandwidth budget, and take what comes meanwhile."""
        return Random(f"budgets {self.seed}").random() < 0.25

    @property
    def numbering(self) -> Numbering:
        """How numbers and devices belong together."""
        return Numbering(self.num_peers)

    def newcomer(self, peer: int) -> Newcomer:
        """Return what a peer says of itself that takes part again."""
        return Newcomer(self.name_of(peer), None, None, b"")

    def name_of(self, peer: int) -> str:
        """Return the name of the device that has a number."""
        return f"peer-{self.numbering.device(peer)}"

    def check_newcomer(self, peer: int, said: Newcomer) -> None:
        """Raise SecurityError unless a peer that takes part again is the device that it is said to be."""
        if said != self.newcomer(peer):
            raise SecurityError("its certificate is another's")

    @property
    def somebody_is_lost(self) -> bool:
        """Whether members may leave or be lost."""
        return bool(self.happenings)

    @cached_property
    def members_can_change(self) -> bool:
        """Whether the peers heed what they are told of members."""
        return bool(self.happenings) or (self.lies and self.spec.changes_members and not self.case.late)

    @cached_property
    def case(self) -> Case:
        return CASES[self.seed % len(CASES)] if self.name is None else BY_NAME[self.name]

    @cached_property
    def num_first(self) -> int:
        """How many peers begin."""
        return 4 if self.graph_kind.startswith("four-node") else Random(f"peers {self.seed}").choice((3, 4, 4, 5))

    @property
    def num_peers(self) -> int:
        """How many there may ever be: those that join later have the highest numbers."""
        return self.num_first + sum(each.kind is ChangeKind.JOIN for each in self.happenings)

    @cached_property
    def happenings(self) -> tuple[Happening, ...]:
        """What befalls the members, by round: nothing in half of the scenarios in which they may change, else up to
        three things, of which one loss at most, so that what is lost can be told from what may not be."""
        random = Random(f"members {self.seed}")
        if not self.spec.changes_members or self.case.late or random.random() < 0.5:
            return ()
        happenings: list[Happening] = []
        newcomers, staying = self.num_first, list(range(self.num_first))
        latest = max(2, self.rounds - 25)
        for at_round in sorted(random.randint(1, latest) for _ in range(random.choice((1, 2, 2, 3)))):
            kinds = [ChangeKind.JOIN] if newcomers < self.num_first + 2 else []
            if len(staying) > 2:
                kinds.append(ChangeKind.LEAVE)
                if self.lost_subject(happenings) is None:
                    kinds += [ChangeKind.LOST] * 2
            kind = random.choice(kinds)
            if kind is ChangeKind.JOIN:
                happenings.append(Happening(kind, newcomers, at_round))
                newcomers += 1
                continue
            joined = [each.subject for each in happenings if each.kind is ChangeKind.JOIN]
            subject = random.choice([*staying, *joined] if kind is ChangeKind.LOST else staying)
            is_alive = kind is ChangeKind.LOST and random.random() < 0.3
            happenings.append(Happening(kind, subject, at_round, is_alive))
            staying = [peer for peer in staying if peer != subject]
        return tuple(happenings)

    @staticmethod
    def lost_subject(happenings: Sequence[Happening]) -> int | None:
        """Return who is lost for good, if anybody is."""
        return next((each.subject for each in happenings if each.kind is ChangeKind.LOST), None)

    @cached_property
    def graph_kind(self) -> str:
        random = Random(f"graph {self.seed}")
        if self.spec.graph is GraphNeed.COLUMN:
            return random.choice((*_GRAPHS_COLUMN, "four-node-a"))
        if self.spec.graph is GraphNeed.COMPLETE:
            return "complete"
        return random.choice(_GRAPHS_DOUBLY)

    @property
    def spec(self) -> AlgorithmSpec:
        return gossip.ALGORITHMS[self.case.algorithm].spec

    @cached_property
    def layout(self) -> Layout:
        random = Random(f"layout {self.seed}")
        return (
            Layout.of_shapes(random.choice(_SHAPES))
            if self.spec.sends_factors
            else Layout.of_sizes(random.choice(_SIZES))
        )

    @cached_property
    def schedule(self) -> Schedule:
        """The graph of the peers that begin."""
        kind = self.graph_kind
        kinds = ("four-node-a", "four-node-b", "four-node-c") if kind == "four-node-a" else (kind,)
        return _schedule(self.num_first, kinds, self._is_doubly, self.seed % 8)

    @property
    def _is_doubly(self) -> bool:
        return self.spec.graph in (GraphNeed.DOUBLY, GraphNeed.SYMMETRIC)

    def graph_of(self, members: tuple[int, ...]) -> Schedule:
        """Return the graph over the positions of some members: of the same kind, or a ring where that has none. As
        `run.setup.RunSetup.graph_of`."""
        if members == tuple(range(self.num_first)):
            return self.schedule
        if len(members) == 1:
            return Schedule.from_matrices([[[1.0]]])
        if not self.graph_kind.startswith("four-node"):
            with contextlib.suppress(ConfigError):
                graph = _schedule(len(members), (self.graph_kind,), self._is_doubly, self.seed % 8)
                if graph.is_strongly_connected:
                    return graph
        return _schedule(len(members), ("ring",), self._is_doubly, 0)

    def neighbors(self, peer: int) -> list[int]:
        """Return whom a peer is ever connected to, ascending."""
        if self.members_can_change:
            return [other for other in range(self.num_peers) if other != peer]
        return sorted({*self.schedule.all_senders(peer), *self.schedule.all_receivers(peer)})

    @cached_property
    def compressor(self) -> Compressor:
        if not self.spec.compresses:
            return compress.build("none")
        if self.spec.modulo:
            return compress.build("modulo", bits=self.case.bits, verified=self.case.verified)
        kind, settings = Random(f"compressor {self.seed}").choice(_COMPRESSORS)
        if kind == "sign" and self.spec.needs_unbiased:
            kind, settings = "qsgd", {"bits": 4}
        if kind in ("random_k", "top_k") and self.spec.needs_unbiased:
            # Replicas that get a quarter of the numbers, four times as large, grow by themselves.
            kind, settings = "random_k", {"fraction": 0.9}
        if kind in ("qsgd", "random_k"):
            settings = {**settings, "unbiased": self.spec.needs_unbiased}
        return compress.build(kind, **settings)

    @cached_property
    def late_policy(self) -> LatePolicy | None:
        if not self.case.late:
            return None
        adaptive = Random(f"deadlines {self.seed}").random() < 0.5
        return LatePolicy(after_s=0.05, max_skipped=5, adaptive=adaptive, silent_after_s=1.0)

    @cached_property
    def max_lead(self) -> int:
        """How many rounds an in-neighbour can be ahead: as `run.setup.RunSetup.max_lead`."""
        lead = (self.schedule.diameter or self.num_first) * max(1, self.schedule.cycle_rounds)
        skipped = 0 if self.late_policy is None else self.late_policy.max_skipped + 1
        return lead + skipped * lead + 1

    @cached_property
    def longest_lead(self) -> int:
        """How many rounds a peer can be ahead of another, whoever takes part."""
        graphs = [self.graph_of(tuple(range(1, 1 + members))) for members in range(2, self.num_peers + 1)]
        leads = [(graph.diameter or graph.num_peers) * max(1, graph.cycle_rounds) + 1 for graph in graphs]
        return max([*leads, self.max_lead])

    @cached_property
    def averaging_rate(self) -> float:
        if self.case.algorithm in ("d2", "moniqua-d2"):
            return 0.5
        if self.spec.modulo:
            return 0.5
        return 1.0 if not self.spec.compresses or self.compressor.kind == "none" else 0.2

    @property
    def conserves_sum(self) -> bool:
        """Whether Σx moves by the gradient steps alone, and by what is had of a lost peer and given to it. DCD and ECD
        keep it on average over the draws only: what they average is the replicas, and those lack what the compressor
        left out. All-reduce in parts moves by what it added up and keeps the rest in memories. D² adds what was had of
        a lost peer once more in each round, until it begins anew; and modulo codes say nothing to whom they are not
        for."""
        if self.lost_subject(self.happenings) is not None and (self.spec.modulo or self.case.algorithm == "d2"):
            return False
        return self.case.algorithm not in ("dcd-psgd", "ecd-psgd", "low-rank", "compressed-allreduce")

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
        statements: Statements | None = None,
    ) -> Participant:
        """Return one peer, ready for round 0. With `statements`, members declare losses themselves."""
        final = min(10, self.rounds // 4) if self.case.algorithm == "scsp" else 0
        views = None
        if self.members_can_change:
            views = ViewSchedule(max(self.num_peers, peer + 1), Membership(tuple(range(self.num_first))), self.graph_of)
        schedule = views or self.schedule
        node = NodeContext(
            peer=peer,
            schedule=schedule,
            layout=self.layout,
            draw_source=PhiloxSource(self.seed, peer),
            compressor=self.compressor,
            averaging_rate=self.averaging_rate,
            # As in the product: a peer whose only in-neighbour is lost hears nobody for some rounds.
            push_weight_guard=0.5 if self.case.late or self.somebody_is_lost else 0.0,
            drift_gain=(lambda: default_gain(self.averaging_rate, schedule.spectral_gap))
            if self.case.corrects_drift
            else None,
            in_bfloat16=self.case.in_bfloat16,
            rounds=self.rounds,
            seed=self.seed,
            modulo=ModuloOptions(
                theta=(self.case.theta,),
                theta_mode="verified" if self.case.verified else "constant",
                verified=self.case.verified,
            ),
            final=FinalRounds(count=final),
            # With 2 bits this training diverges, with nobody to blame.
            low_rank=LowRankOptions(rank=1, bits=self.seed % 6 + 3, exponents="layer" if self.seed % 2 else "vector"),
            momentum=partial(Momentum, ("none", "heavy-ball", "nesterov", "qg", "adam")[self.seed % 5]),
        )
        training = VirtualTraining(
            self.layout.size,
            self.rounds,
            seed=self.seed,
            # Whoever takes part again has the data that it had.
            peer=self.numbering.device(peer),
            quasi_global=self.seed % 3 == 1 and self.spec.graph in (GraphNeed.COLUMN, GraphNeed.DOUBLY),
            on_step=on_step,
        )
        rules = MembershipRules(
            num_listed=self.num_peers,
            check_newcomer=self.check_newcomer,
            statements=statements,
            by_majority=statements is not None,
            name_of=self.name_of,
        )
        return participant(
            self.case.algorithm,
            node,
            self.x0,
            training,
            max_lead=self.max_lead,
            late=self.late_policy,
            observe=observe,
            membership_rules=rules,
        )


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
