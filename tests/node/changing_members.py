"""A run whose members change, in one process: production peers with their journals, each pair joined by two queues.

Which queue delivers next is drawn from a seed, so that peers run ahead of each other as far as their graph lets them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from peer import gossip
from peer.compress.layout import Layout
from peer.daemon.members.signed_statements import SignedStatements
from peer.gossip.base import GraphNeed
from peer.gossip.effects import Effects
from peer.gossip.incarnations import Numbering
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.gossip.options import RobustMixing
from peer.gossip.topology import Schedule
from peer.gossip.views import ViewSchedule
from peer.net.security.authority import CertificateAuthority
from peer.net.security.certificates import Place, Role
from peer.net.security.credentials import Credentials
from peer.net.security.orders import loss_order
from peer.net.security.requests import read_request, request_certificate
from peer.node.durable import DurablePeer
from peer.node.membership import MembershipRules
from peer.node.membership_planning import plan_change
from peer.node.participant import Participant
from peer.protocol import OLDEST
from peer.state.statement_counter import StatementCounter
from tests.cluster import Rounds
from tests.peers import (
    Approach,
    ApproachOfScript,
    check_newcomer,
    compressor_of,
    drawn,
    durable,
    graph,
    newcomer,
    node,
    participant,
)
from tests.state.failing_disk import FailingDisk

LAYOUT = Layout.of_shapes(((7,), (3, 4), (1,)))
ROUNDS = 100
AUTHORITY = CertificateAuthority.create("run")


@lru_cache(maxsize=1)
def _operator() -> Credentials:
    return AUTHORITY.credentials(AUTHORITY.issue("operator", role=Role.OPERATOR))


@dataclass
class Cluster(Rounds):
    """`num_first` peers begin, up to `num_peers` can join. `run`, and change something whenever it returns."""

    algorithm: str
    graph: str = "exponential"
    num_first: int = 5
    num_peers: int = 6
    seed: int = 0
    gradients_until: int = 30
    theta: float = 2.0
    verified: bool = True
    """Whether codes tell whether they were read right."""
    is_script: bool = False
    """Whether scripts do the local steps."""
    restarts: float = 0.0
    """How often a peer ends and starts again, in parts of all that happens."""
    num_listed: int | None = None
    """How many peers everybody lists; those above are newcomers, each in no list but its own."""
    signed: bool = False
    """Whether the run has certificates."""
    robust: RobustMixing | None = None
    by_majority: bool = False
    """Whether the members declare losses themselves."""
    protocol_of: Callable[[Change], int] = lambda change: OLDEST
    """Which version of the protocol a change of the members needs."""

    def __post_init__(self) -> None:
        super().__init__(self.num_peers, self.seed, 0)
        self.spec = gossip.ALGORITHMS[self.algorithm].spec
        self.start()

    def _graph_of(self, members: tuple[int, ...]) -> Schedule:
        return graph(self.graph, len(members), self.spec.graph is not GraphNeed.COLUMN)

    def make(self, peer: int) -> DurablePeer:
        first = self._graph_of(tuple(range(self.num_first)))
        listed = self.num_listed or self.num_peers
        made_from = node(
            self.algorithm,
            peer,
            ViewSchedule(max(listed, peer + 1), Membership(tuple(range(self.num_first))), self._graph_of),
            LAYOUT,
            compressor=compressor_of(self.spec, verified=self.verified),
            rounds=ROUNDS,
            theta=self.theta,
            verified=self.verified,
            robust=self.robust,
        )
        device = self.numbering.device(peer)
        # Whoever takes part again has the data that it had.
        goal = drawn(device, LAYOUT.size)
        steps = (ApproachOfScript if self.is_script else Approach)(goal, self.gradients_until)
        rules = MembershipRules(
            num_listed=listed,
            check_newcomer=lambda peer, said: check_newcomer(self.numbering.device(peer), said),
            statements=self.statements(peer) if self.signed else None,
            by_majority=self.by_majority,
            name_of=lambda peer: f"peer-{self.numbering.device(peer)}",
        )
        lead = (first.diameter or self.num_first) * first.cycle_rounds + 1
        made = participant(
            self.algorithm, made_from, drawn(99, LAYOUT.size), steps, max_lead=lead, membership_rules=rules
        )
        return durable(made, self.disks[peer], listed, protocol_of=self.protocol_of)

    def statements(self, peer: int, *, unsigned: Literal["refuse", "accept"] = "refuse") -> SignedStatements:
        """Return what signs for a peer and judges what others have signed, with a certificate that is new each time."""
        listed = self.num_listed or self.num_peers
        device = self.numbering.device(peer)
        place = None if device < listed else Place(device, None)
        pem, key = request_certificate(f"peer-{device}")
        identity, certificate = AUTHORITY.grant(read_request(pem), place=place)
        return SignedStatements(
            Credentials(identity, AUTHORITY.certificate, certificate, key),
            run="run",
            listed=[f"peer-{each}" for each in range(listed)],
            counter=StatementCounter(self.disks[peer], 1.0),
            unsigned=unsigned,
        )

    def after(self, me: int, effects: Effects) -> None:
        peer = self.peers[me]
        if effects.finished is not None and peer.round % 7 == me % 7:
            self.confirm(me, peer.save({}))
        while self.random.random() < 0.1:
            self.confirm(me, peer.sync())

    @property
    def numbering(self) -> Numbering:
        """How numbers and devices belong together."""
        return Numbering(self.num_listed or self.num_peers)

    def come_back(self, peer: int) -> int:
        """Start the device of a lost peer, without its old state, as its next incarnation; return the number."""
        number = peer + self.numbering.stride
        self.disks[number] = FailingDisk()
        self.open(number)
        self.connect(number)
        return number

    def announce(self, peer: int, kind: ChangeKind, subject: int) -> Change:
        is_newcomer = kind is ChangeKind.JOIN and subject >= (self.num_listed or self.num_peers)
        who = newcomer(self.numbering.device(subject)) if is_newcomer else None
        ordered = self.order(subject) if kind is ChangeKind.LOST and self.signed else b""
        change = plan_change(self.peers[peer].participant.membership, kind, subject, who, ordered=ordered)
        self.perform(peer, self.peers[peer].announce(change, 0.0))
        return change

    def order(self, subject: int) -> bytes:
        """Return that an operator wants the others to go on without a peer."""
        name, incarnation = f"peer-{self.numbering.device(subject)}", self.numbering.incarnation(subject)
        return loss_order(name, "run", _operator(), incarnation)

    def declare_lost(self, subject: int) -> Change:
        """Let the first of those who hear a peer announce that it is lost."""
        issuer = next(p.peer for p in self.members if p.session.last_heard(subject) is not None)
        return self.announce(issuer, ChangeKind.LOST, subject)

    def run(self, upto: int) -> None:
        """Run until every member that lives has completed `upto` rounds, or nothing moves any more."""
        self.upto = upto
        while any(map(self.may_begin, self.living())) or self.arrived(self.living()):
            if self.random.random() < self.restarts:
                self.restart(self.random.choice(self.living()))
            else:
                self.draw()

    @property
    def members(self) -> list[Participant]:
        """The members that live."""
        participants = [peer.participant for peer in self.peers.values() if peer.participant.peer not in self.dead]
        return [participant for participant in participants if participant.membership.is_member]

    def rounds(self) -> dict[int, int]:
        return {member.peer: member.round for member in self.members}

    def weight(self) -> float:
        """Return Σu of the members."""
        return sum(member.algorithm.u for member in self.members)

    def drift(self) -> npt.NDArray[np.float64]:
        """Return Σx of the members less what the local steps of all peers put in."""
        total = sum((member.algorithm.x.astype(np.float64) for member in self.members), np.zeros(LAYOUT.size))
        return total - sum((_steps(peer).kept for peer in self.peers.values()), np.zeros(LAYOUT.size))

    def spread(self) -> float:
        """Return the largest distance of a member's model from another's, in one coordinate."""
        return float(np.ptp([member.model() for member in self.members], axis=0).max())


def _steps(peer: DurablePeer) -> Approach:
    assert isinstance(peer.participant.local_steps, Approach)
    return peer.participant.local_steps
