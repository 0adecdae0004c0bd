"""The runs in which peers are lied to: every algorithm, each in the circumstances that change what it accepts.

Models are tiny, so that a call costs what judging costs and not what arithmetic costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from peer import compress, gossip
from peer.compress.base import Compressor
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.gossip.base import AlgorithmSpec, GraphNeed, NodeContext
from peer.gossip.late_neighbors import LatePolicy
from peer.gossip.membership import ChangeKind, Membership
from peer.gossip.options import FinalRounds
from peer.gossip.topology import Schedule
from peer.gossip.views import ViewSchedule
from peer.node.durable import DurablePeer
from peer.node.durable_pair import DurablePair
from peer.node.membership import MembershipRules
from peer.state.disk import Disk
from tests.peers import Approach, check_newcomer, compressor_of, drawn, durable, durable_pair, graph, node, participant

LAYOUT = Layout.of_shapes(((3, 2), (1,), (3,)))
NUM_FIRST = 3


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """One row of what is fuzzed."""

    algorithm: str
    name: str = ""
    late: bool = False
    """Whether peers go on without late neighbours."""
    change: ChangeKind | None = None
    """What befalls the members of the run."""
    is_listed: bool = True
    """Of a peer that joins: whether everybody lists it."""
    compressor: tuple[str, Mapping[str, Any]] | None = None
    theta: float = 0.0
    verified: bool = False

    def __str__(self) -> str:
        return f"{self.algorithm}, {self.name}" if self.name else self.algorithm

    @property
    def spec(self) -> AlgorithmSpec:
        return gossip.ALGORITHMS[self.algorithm].spec

    @property
    def changes_members(self) -> bool:
        """Whether members may change in this run, as the configuration decides it."""
        return self.spec.changes_members and not self.late

    @property
    def rounds(self) -> int:
        """Enough for a change of members to be planned, to count, and to be lived with."""
        if self.spec.asynchronous:
            return 4
        if self.change is not None:
            return 26
        return 14 if self.changes_members else 7

    @property
    def num_peers(self) -> int:
        """Those that begin, and one that may join where members may change."""
        return NUM_FIRST + self.changes_members

    @property
    def num_listed(self) -> int:
        return self.num_peers if self.is_listed else NUM_FIRST


class Builder:
    """Builds the peers of a run; what they share is built once."""

    def __init__(self, circumstances: Circumstances) -> None:
        self.circumstances = circumstances
        self.spec = circumstances.spec

    @cached_property
    def kind(self) -> str:
        """Of the graph."""
        if self.spec.graph is GraphNeed.COMPLETE:
            return "complete"
        if self.spec.graph is GraphNeed.SERVER:
            return "star"
        # Two of the three peers hear different ones: columns that are no rows.
        return "directed-ring" if self.spec.graph is GraphNeed.COLUMN and self.circumstances.late else "ring"

    def graph_of(self, members: tuple[int, ...]) -> Schedule:
        """Return the graph over the positions of some members."""
        doubly = self.spec.graph in (GraphNeed.DOUBLY, GraphNeed.SYMMETRIC)
        return graph(self.kind, len(members), doubly)

    @cached_property
    def first(self) -> Schedule:
        return self.graph_of(tuple(range(NUM_FIRST)))

    @cached_property
    def compressor(self) -> Compressor:
        chosen = self.circumstances.compressor
        if chosen is not None:
            return compress.build(chosen[0], **chosen[1])
        return compressor_of(self.spec, bits=4, verified=self.circumstances.verified)

    @cached_property
    def late_policy(self) -> LatePolicy | None:
        return LatePolicy(after_s=6.0, max_skipped=2, silent_after_s=40.0) if self.circumstances.late else None

    @cached_property
    def shared(self) -> tuple[object, ...]:
        """Return what no call on a peer changes."""
        return (self, LAYOUT, self.first, self.compressor, self.spec, self.circumstances, self.late_policy)

    def node(self, peer: int) -> NodeContext:
        circumstances = self.circumstances
        schedule: Schedule | ViewSchedule = self.first
        if circumstances.changes_members:
            listed = max(circumstances.num_listed, peer + 1)
            schedule = ViewSchedule(listed, Membership(tuple(range(NUM_FIRST))), self.graph_of)
        return node(
            circumstances.algorithm,
            peer,
            schedule,
            LAYOUT,
            compressor=self.compressor,
            push_weight_guard=0.5,
            rounds=circumstances.rounds,
            seed=7,
            theta=circumstances.theta,
            verified=circumstances.verified,
            final=FinalRounds(count=2 if self.spec.final_rounds else 0),
        )

    def start(self, peer: int) -> FloatArray:
        """Return where a peer begins; peers without rounds differ, so that an exchange moves something."""
        return drawn(peer if self.spec.asynchronous else 99, LAYOUT.size)

    def local_steps(self, peer: int) -> Approach:
        return Approach(drawn(100 + peer, LAYOUT.size))

    def peer(self, peer: int, disk: Disk) -> DurablePeer:
        """Return a peer of a run in rounds, not opened yet."""
        circumstances = self.circumstances
        lead = (self.first.diameter or NUM_FIRST) * max(1, self.first.cycle_rounds)
        skipped = 0 if self.late_policy is None else self.late_policy.max_skipped + 1
        rules = MembershipRules(
            why_no_changes=None if circumstances.changes_members else "the members of this run cannot change",
            num_listed=circumstances.num_listed,
            check_newcomer=check_newcomer,
        )
        made = participant(
            circumstances.algorithm,
            self.node(peer),
            self.start(peer),
            self.local_steps(peer),
            max_lead=lead + skipped * lead + 1,
            late=self.late_policy,
            membership_rules=rules,
        )
        return durable(made, disk, circumstances.num_listed)

    def pair(self, peer: int, disk: Disk) -> DurablePair:
        """Return a peer of a run without rounds, not opened yet."""
        algorithm = self.circumstances.algorithm
        return durable_pair(algorithm, self.node(peer), self.start(peer), self.local_steps(peer), disk)


def _all() -> tuple[Circumstances, ...]:
    found: list[Circumstances] = []
    for cls in gossip.ALGORITHMS.values():
        spec = cls.spec
        theta, verified = (2.0, True) if spec.modulo else (0.0, False)

        def case(
            name: str = "", *, algorithm: str = spec.name, theta: float = theta, verified: bool = verified, **more: Any
        ) -> None:
            found.append(Circumstances(algorithm=algorithm, name=name, theta=theta, verified=verified, **more))

        case()
        if spec.tolerates_late:
            case("late neighbours", late=True)
        if spec.modulo:
            code = ("modulo", {"bits": 4, "verified": True})
            # A first θ far too small: there are repairs.
            case("repairs", compressor=code, theta=1e-3)
            case("constant theta", verified=False)
        if spec.changes_members:
            case("a peer joins", change=ChangeKind.JOIN)
            case("a newcomer joins", change=ChangeKind.JOIN, is_listed=False)
            case("a peer leaves", change=ChangeKind.LEAVE)
            case("a peer is lost", change=ChangeKind.LOST)
    return tuple(found)


CIRCUMSTANCES = _all()
ALGORITHMS = tuple(gossip.ALGORITHMS)


def circumstances_of(algorithm: str, seed: int) -> Circumstances:
    """Return the circumstances of one seed of an algorithm. Half of the seeds are those of a plain run."""
    cases = [each for each in CIRCUMSTANCES if each.algorithm == algorithm]
    return cases[0] if seed % 2 else Random(f"circumstances {seed}").choice(cases)
