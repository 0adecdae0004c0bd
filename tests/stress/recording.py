"""Records what peers do, to the byte, so that two states of the code can be compared.

    python -m tests.stress.recording --out before.json       # in one clone
    python -m tests.stress.recording --against before.json   # in another one, on the same machine
    python -m tests.stress.recording --cell "sgp join"       # every event of a cell, to be compared line by line

A cell is one algorithm in one situation: nothing happens, neighbours are late and left out, the process of a peer ends
at one of the operations on its disk, a peer joins, leaves or is lost. It has twenty rounds and a checkpoint every four.
Recorded are every frame, all effects of every call, every operation on every disk, and what the peers hold in the end.
Kernels and LAPACK may return other bits on another processor, so a recording is good for one machine.

The disk, the clock and the order of events are this file's own. It knows a peer by what `RoundPeer` and `PairPeer`
call, and where an interface changes, these alone change here.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import count
from multiprocessing import Pool
from pathlib import Path
from random import Random
from typing import Generic, TypeVar

import click
import numpy as np
import xxhash

from peer import compress, gossip
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.gossip import build_pair_node
from peer.gossip.base import GraphNeed, NodeContext
from peer.gossip.effects import Effects
from peer.gossip.late_neighbors import LatePolicy
from peer.gossip.membership import ChangeKind, Membership
from peer.gossip.options import LowRankOptions, ModuloOptions
from peer.gossip.topology import Schedule, build_schedule
from peer.gossip.views import ViewSchedule
from peer.node.durable import DurablePeer
from peer.node.durable_pair import DurablePair
from peer.node.membership import MembershipRules
from peer.node.membership_planning import plan_change
from peer.node.pair_participant import PairParticipant
from peer.node.participant import Participant
from peer.random import PhiloxSource
from peer.train.momentum import Momentum
from peer.wire.last_codes import LastCodes
from tests.node.local_steps import KeptSteps, Step
from tests.state.failing_disk import FailingDisk, ProcessEnds

ROUNDS, SAVE_EVERY = 20, 4
FIRST, NEWCOMER = 4, 4
"""How many peers begin, and the number of the one that joins."""
VICTIM = 1
"""The peer whose process ends, that is late, that leaves, and that is lost."""
LAYOUT = Layout.of_shapes(((7,), (3, 4), (1,)))


# -- what is recorded --------------------------------------------------------------------------------------------------


class Trace:
    """A hash over everything that happened, and on request the events themselves."""

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        self._hash, self._tell = xxhash.xxh3_128(), tell
        self.events = 0

    def add(self, *event: object) -> None:
        line = " ".join(map(canonical, event))
        self._hash.update(line.encode() + b"\n")
        self.events += 1
        if self._tell is not None:
            self._tell(line)

    def digest(self) -> str:
        return f"{self.events} events, {self._hash.hexdigest()}"


def canonical(value: object) -> str:
    """Return a value as text that is the same for the same bits. Fields that hold nothing are left out, so that a field
    that is new, and not used, changes nothing."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)}:{xxhash.xxh3_64_hexdigest(value)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}:{xxhash.xxh3_64_hexdigest(np.ascontiguousarray(value).tobytes())}"
    if isinstance(value, BaseException):
        return f"{type(value).__name__}({value})"
    if is_dataclass(value) and not isinstance(value, type):
        kept = ((each.name, getattr(value, each.name)) for each in fields(value))
        return "(" + ", ".join(f"{name}={canonical(held)}" for name, held in sorted(kept) if not _is_empty(held)) + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{canonical(key)}: {canonical(held)}" for key, held in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(canonical, value)) + "]"
    return str(value) if isinstance(value, str) else repr(value)


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, int | float | str | bytes | list | tuple | dict) and not value)


class Pull(KeptSteps):
    """Local steps toward a point of the peer's own, and their sum."""

    def __init__(self, peer: int) -> None:
        super().__init__(np.zeros(LAYOUT.size))
        self.goal = np.random.default_rng(peer).normal(size=LAYOUT.size).astype("f4")

    def rate(self, t: int) -> float:
        return 0.1

    def gradient(self, z: FloatArray, t: int, rate: float, z_step: float) -> Step:
        gradient = (z - self.goal).astype("f4")
        self.kept -= rate * gradient.astype(np.float64)
        return Step(gradient)


# -- the adapter: what the product's peers are called by ---------------------------------------------------------------


def _no_time() -> float:
    return 0.0


def _start(peer: int) -> FloatArray:
    return np.random.default_rng(99).normal(size=LAYOUT.size).astype("f4")


class RoundPeer:
    """A peer of an algorithm with rounds, of so many `numbers`: a process that recovers when it is made."""

    def __init__(
        self, algorithm: str, me: int, disk: FailingDisk, *, numbers: int, changes: bool, late: LatePolicy | None
    ) -> None:
        spec = gossip.ALGORITHMS[algorithm].spec
        kind = {GraphNeed.COLUMN: "exponential", GraphNeed.COMPLETE: "complete", GraphNeed.SERVER: "star"}
        symmetric = spec.graph in (GraphNeed.DOUBLY, GraphNeed.SYMMETRIC)

        def graph_of(members: tuple[int, ...]) -> Schedule:
            if len(members) == 1:
                return Schedule.from_matrices([[[1.0]]])
            return build_schedule(len(members), kind.get(spec.graph, "ring"), doubly=symmetric)

        first = graph_of(tuple(range(FIRST)))
        if spec.modulo:
            compressor = compress.build("modulo", bits=8, verified=True)
        elif spec.needs_unbiased:
            compressor = compress.build("qsgd", bits=7, unbiased=True)
        else:
            compressor = compress.build("top_k", fraction=0.4) if spec.compresses else compress.build("none")
        node = NodeContext(
            peer=me,
            schedule=ViewSchedule(numbers, Membership(tuple(range(FIRST))), graph_of) if changes else first,
            layout=LAYOUT,
            draw_source=PhiloxSource(7, me),
            compressor=compressor,
            averaging_rate=spec.default_averaging_rate or (0.3 if spec.compresses else 1.0),
            push_weight_guard=0.5 if late is not None or changes else 0.0,
            rounds=ROUNDS,
            # Too small a θ at first, so that there are repairs.
            modulo=ModuloOptions(theta=(0.02,), theta_mode="verified", verified=True),
            low_rank=LowRankOptions(rank=1),
            momentum=partial(Momentum, "nesterov"),
        )
        self._participant = Participant(
            peer=me,
            algorithm=gossip.build(algorithm, node, _start(me)),
            local_steps=Pull(me),
            layout=LAYOUT,
            max_lead=(first.diameter or FIRST) * first.cycle_rounds * (4 if late else 1) + 1,
            late=late,
            membership_rules=MembershipRules(num_listed=numbers),
            last_codes=LastCodes(LAYOUT, np.float32, tells_changes=True) if spec.modulo else None,
            cpu_clock=_no_time,
            stopwatch=_no_time,
        )
        others = [other for other in range(numbers) if other != me]
        self._peer = DurablePeer(self._participant, disk, neighbors=others, identity={"run": "run", "peer": str(me)})
        self.recovered = self._peer.open().effects

    @property
    def round(self) -> int:
        return self._peer.round

    @property
    def may_begin(self) -> bool:
        return self._participant.membership.is_member and not self._participant.session.in_round and self.round < ROUNDS

    def has_lost(self, peer: int) -> bool:
        return peer in self._participant.session.lost

    def begin(self, now: float) -> Effects:
        self._peer.step()
        return self._peer.begin(now)

    def receive(self, sender: int, seq: int, frame: bytes, now: float) -> Effects:
        return self._peer.receive(sender, seq, frame, now)

    def timer(self, now: float) -> Effects:
        return self._peer.timer(now)

    def publish(self, effects: Effects) -> Iterator[tuple[int, int, bytes]]:
        """Yield (receiver, number, frame) in the order in which they are sent."""
        for outgoing in self._peer.publish(effects):
            yield outgoing.receiver, outgoing.seq, outgoing.frame

    def receipt(self, peer: int, upto: int) -> None:
        self._peer.receipt(peer, upto)

    def save(self, now: float) -> dict[int, int]:
        return self._peer.save({"seconds": now})

    def sync(self) -> dict[int, int]:
        return self._peer.sync()

    def hello(self, peer: int) -> int:
        """Return up to which number this peer has the frames of another for good."""
        self._peer.links.meet(peer)
        return self._peer.links.durable_from(peer)

    def connected(self, peer: int, has: int) -> list[tuple[int, bytes]]:
        return self._peer.connected(peer, has)

    def announce(self, kind: ChangeKind, subject: int, now: float) -> Effects:
        return self._peer.announce(plan_change(self._participant.membership, kind, subject, None), now)

    def state(self) -> list[object]:
        algorithm, membership = self._participant.algorithm, self._participant.membership
        arrays = {**algorithm.state(), **self._participant.local_steps.state()}
        return [self.round, algorithm.u, membership.changes, {name: arrays[name] for name in sorted(arrays)}]


class PairPeer:
    """A peer of an algorithm without rounds."""

    def __init__(self, algorithm: str, me: int, disk: FailingDisk) -> None:
        spec = gossip.ALGORITHMS[algorithm].spec
        node = NodeContext(
            peer=me,
            schedule=build_schedule(FIRST, "ring", doubly=True),
            layout=LAYOUT,
            draw_source=PhiloxSource(7, me),
            compressor=compress.build("modulo", bits=4, rounding="dither", verified=True)
            if spec.modulo
            else compress.build("none"),
            rounds=ROUNDS,
            modulo=ModuloOptions(theta=(0.02,), theta_mode="verified", verified=True),
        )
        self._participant = PairParticipant(
            algorithm=build_pair_node(algorithm, node, _start(me)),
            local_steps=Pull(me),
            cpu_clock=_no_time,
            stopwatch=_no_time,
        )
        self._peer = DurablePair(self._participant, disk, identity={"run": "run", "peer": str(me)})
        self.recovered = self._peer.open().effects

    @property
    def round(self) -> int:
        return self._peer.round

    @property
    def computes(self) -> bool:
        return self._participant.in_iteration

    @property
    def may_read(self) -> bool:
        return not self.computes and self.round < ROUNDS and self._participant.can_read

    @property
    def is_open(self) -> bool:
        """Whether it waits for an answer."""
        return self._participant.open_partner is not None

    def read(self, now: float) -> Effects:
        return self._peer.read(now)

    def step(self, now: float) -> Effects:
        self._peer.compute()
        return self._peer.step(now)

    def receive(self, sender: int, frame: bytes, now: float) -> Effects:
        return self._peer.receive(sender, frame, now)

    def timer(self, now: float) -> Effects:
        return self._peer.timer(now)

    def disconnected(self, peer: int) -> Effects:
        return self._peer.disconnected(peer)

    def save(self, now: float) -> None:
        self._peer.save({"seconds": now})

    def state(self) -> list[object]:
        algorithm = self._participant.algorithm
        arrays = {**algorithm.state(), **self._participant.local_steps.state()}
        return [self.round, {name: arrays[name] for name in sorted(arrays)}]


# -- the clusters ------------------------------------------------------------------------------------------------------


@dataclass
class Situation:
    """What happens in a cell."""

    algorithm: str
    what: str
    """"wait", "skip", "join", "leave", "loss" or "end"."""
    at: int = 0
    """Where the process ends: the operation on its disk, counted from 0."""

    @property
    def name(self) -> str:
        return f"{self.algorithm} {self.what}" + (f" {self.at}" if self.what == "end" else "")

    @property
    def is_in_pairs(self) -> bool:
        return gossip.ALGORITHMS[self.algorithm].spec.asynchronous


P = TypeVar("P", RoundPeer, PairPeer)


class Cluster(ABC, Generic[P]):
    """Processes of peers that can end and start again. A seed decides who does what next."""

    def __init__(self, situation: Situation, trace: Trace, numbers: int) -> None:
        self.situation, self.trace = situation, trace
        self.random, self.now = Random(situation.algorithm), 0.0
        self.seen: set[str] = set()
        """What was to happen, and has."""
        self.peers: dict[int, P] = {}
        self.disks = {peer: FailingDisk(observe=partial(trace.add, peer)) for peer in range(numbers)}
        if situation.what == "end":
            self.disks[VICTIM].end_at, self.disks[VICTIM].torn = situation.at, 0.5

    @abstractmethod
    def make(self, me: int) -> P:
        """Make a peer, which recovers what is on its disk."""

    def recover(self, me: int) -> P:
        """Start a process, again if it ends in that."""
        while me not in self.peers:
            try:
                self.peers[me] = self.make(me)
            except ProcessEnds:
                self.ended(me)
        peer = self.peers[me]
        self.trace.add(me, "starts", peer.round, peer.recovered)
        return peer

    def ended(self, me: int) -> None:
        self.trace.add(me, "ends")
        self.seen.add("end")
        self.peers.pop(me, None)


class Rounds(Cluster[RoundPeer]):
    """Peers with rounds. Time passes with each event."""

    def __init__(self, situation: Situation, trace: Trace) -> None:
        what = situation.what
        super().__init__(situation, trace, FIRST + (what == "join"))
        self.changes = what in ("join", "leave", "loss")
        self.late = LatePolicy(after_s=12.0, max_skipped=2) if what == "skip" else None
        self.wake_at: dict[int, float | None] = {}
        self.queues: dict[tuple[int, int], deque[tuple[float, int, bytes]]] = {}
        self.gone: set[int] = set()
        for peer in self.disks:
            self.start(peer)

    def make(self, me: int) -> RoundPeer:
        return RoundPeer(
            self.situation.algorithm,
            me,
            self.disks[me],
            numbers=len(self.disks),
            changes=self.changes,
            late=self.late,
        )

    def start(self, me: int) -> None:
        """Start a process, and let it meet those that are there."""
        self.wake_at[me] = self.recover(me).recovered.wake_at
        for other in sorted(self.peers.keys() - {me} - self.gone):
            for a, b in ((me, other), (other, me)):
                frames = self.peers[a].connected(b, self.peers[b].hello(a))
                self.queues[a, b] = deque((self.now, *each) for each in frames)
                self.trace.add(a, "meets", b, frames)

    def do(self, me: int, call: Callable[[RoundPeer], Effects]) -> None:
        """Let a peer do something, and perform what comes of it. A process that ends in that starts again."""
        try:
            self.perform(me, call(self.peers[me]))
        except ProcessEnds:
            self.ended(me)
            self.start(me)

    def perform(self, me: int, effects: Effects) -> None:
        peer = self.peers[me]
        self.trace.add(me, "asks", effects)
        self.wake_at[me] = effects.wake_at
        for receiver, seq, frame in peer.publish(effects):
            self.trace.add(me, "sends", receiver, seq, frame)
            if receiver not in self.gone:
                is_late = self.late is not None and me == VICTIM and peer.round % 5 == 2
                self.queues[me, receiver].append((self.now + 40.0 * is_late, seq, frame))
        self.confirm(me, effects.receipts)
        if effects.skipped:
            self.seen.add("skip")
        if effects.finished is not None:
            done = peer.round
            self.confirm(me, peer.save(self.now) if done % SAVE_EVERY == 0 else peer.sync() if done % 3 == 1 else {})

    def confirm(self, me: int, receipts: dict[int, int]) -> None:
        self.trace.add(me, "has", receipts)
        for sender, upto in receipts.items():
            if sender in self.peers and sender not in self.gone:
                self.peers[sender].receipt(me, upto)

    def run(self) -> None:
        for turn in count():
            self.now += 1.0
            self.disturb()
            able = [peer for peer in self.peers if peer not in self.gone and self.peers[peer].may_begin]
            ready = [pair for pair, queue in self.queues.items() if queue and queue[0][0] <= self.now]
            due = [
                peer for peer, at in self.wake_at.items() if at is not None and self.now >= at and peer in self.peers
            ]
            due = [peer for peer in due if peer not in self.gone]
            if due:
                self.wake_at[due[0]] = None
                self.do(due[0], lambda peer: peer.timer(self.now))
            elif able and (not ready or self.random.random() < 0.3):
                self.do(self.random.choice(able), lambda peer: peer.begin(self.now))
            elif ready:
                self.deliver(*self.random.choice(ready))
            elif not any(self.queues.values()) and all(at is None for at in self.wake_at.values()):
                break
            assert turn < 100_000, [(peer.round, peer.may_begin) for peer in self.peers.values()]
        what = self.situation.what
        assert what in {"wait", *self.seen}, f"{self.situation.name}: it never happened"
        for me, peer in sorted(self.peers.items()):
            if me not in self.gone:
                assert peer.round == ROUNDS or what == "leave", f"{self.situation.name}: {me} ends at {peer.round}"
                self.trace.add(me, "holds", peer.state())

    def deliver(self, sender: int, receiver: int) -> None:
        _, seq, frame = self.queues[sender, receiver].popleft()
        if self.peers[receiver].has_lost(sender):
            # The link is closed.
            return
        self.do(receiver, lambda peer: peer.receive(sender, seq, frame, self.now))

    def disturb(self) -> None:
        """Let the members change, each in its round."""
        what, rounds = self.situation.what, [peer.round for me, peer in self.peers.items() if me < FIRST]
        if not self.changes or what in self.seen or min(rounds) < 4:
            return
        if what == "loss" and VICTIM not in self.gone:
            self.gone.add(VICTIM)
            self.queues = {pair: queue for pair, queue in self.queues.items() if pair[1] != VICTIM}
        if what == "loss" and any(self.peers[me].may_begin for me in range(FIRST) if me != VICTIM):
            return
        kind = {"join": ChangeKind.JOIN, "leave": ChangeKind.LEAVE, "loss": ChangeKind.LOST}[what]
        issuer = VICTIM if what == "leave" else 0
        subject = NEWCOMER if what == "join" else VICTIM
        self.seen.add(what)
        self.do(issuer, lambda peer: peer.announce(kind, subject, self.now))


class Pairs(Cluster[PairPeer]):
    """Peers without rounds."""

    def __init__(self, situation: Situation, trace: Trace) -> None:
        super().__init__(situation, trace, FIRST)
        self.last: dict[int, Effects] = {}
        self.links = {(a, b): deque[bytes]() for a in range(FIRST) for b in range(FIRST) if a != b}
        for peer in self.disks:
            self.start(peer)

    def make(self, me: int) -> PairPeer:
        return PairPeer(self.situation.algorithm, me, self.disks[me])

    def start(self, me: int) -> None:
        self.last[me] = self.recover(me).recovered

    def run(self) -> None:
        for turn in count():
            self.now += 1.0
            order = self.random.sample(range(FIRST), FIRST)
            busy = [self.turn(me) for me in order]
            if not any(busy) and not any(self.links.values()):
                break
            assert turn < 100_000, [(peer.round, peer.is_open) for peer in self.peers.values()]
        assert self.situation.what in {"wait", *self.seen}, f"{self.situation.name}: it never happened"
        for me, peer in sorted(self.peers.items()):
            assert peer.round == ROUNDS, f"{self.situation.name}: {me} ends at {peer.round}"
            self.trace.add(me, "holds", peer.state())

    def turn(self, me: int) -> bool:
        """Let a peer do one thing; return whether there was any."""
        try:
            return self.act(me)
        except ProcessEnds:
            self.ended(me)
            self.start(me)
            self.connect(me)
            return True

    def act(self, me: int) -> bool:
        peer, wake_at = self.peers[me], self.last[me].wake_at
        waiting = [pair for pair, queue in self.links.items() if pair[1] == me and queue]
        if waiting and self.random.random() < 0.7:
            pair = self.random.choice(waiting)
            self.perform(me, peer.receive(pair[0], self.links[pair][0], self.now))
            self.links[pair].popleft()
        elif wake_at is not None and self.now >= wake_at:
            self.perform(me, peer.timer(self.now))
        elif peer.computes:
            self.perform(me, peer.step(self.now))
            if peer.round % SAVE_EVERY == 0:
                peer.save(self.now)
        elif peer.may_read:
            self.perform(me, peer.read(self.now))
        else:
            return bool(waiting) or peer.is_open
        return True

    def perform(self, me: int, effects: Effects) -> None:
        self.trace.add(me, "asks", effects)
        self.last[me] = effects
        for outgoing in effects.frames:
            self.trace.add(me, "sends", outgoing.receiver, outgoing.frame)
            self.links[me, outgoing.receiver].append(outgoing.frame)

    def connect(self, me: int) -> None:
        for other in sorted(self.peers.keys() - {me}):
            self.links[me, other].clear()
            self.links[other, me].clear()
            self.perform(other, self.peers[other].disconnected(me))
            for a, b in ((me, other), (other, me)):
                request = self.last[a].open_request
                if request is not None and request.receiver == b and not self.links[a, b]:
                    self.links[a, b].append(request.frame)


# -- the program -------------------------------------------------------------------------------------------------------


def record(situation: Situation, tell: Callable[[str], None] | None = None) -> tuple[str, str, int]:
    """Return the name of a cell, what was recorded, and how many operations the disk of the victim saw."""
    trace = Trace(tell)
    cluster = (Pairs if situation.is_in_pairs else Rounds)(situation, trace)
    cluster.run()
    return situation.name, trace.digest(), len(cluster.disks[VICTIM].operations)


def situations(algorithm: str) -> list[Situation]:
    """Return the cells of an algorithm; the process ends at each operation of a run in which nothing else happens."""
    spec = gossip.ALGORITHMS[algorithm].spec
    found = ["wait", *["skip"] * spec.tolerates_late, *["join", "leave", "loss"] * spec.changes_members]
    operations = record(Situation(algorithm, "wait"))[2]
    ends = [Situation(algorithm, "end", at) for at in range(operations)]
    return [*(Situation(algorithm, what) for what in found), *ends]


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), help="Write the recording to a file.")
@click.option("--against", type=click.Path(path_type=Path, exists=True), help="Compare with a recording.")
@click.option("--algorithm", "chosen", multiple=True, help="Record this algorithm only; may be given more than once.")
@click.option("--cell", help="Print the events of one cell.")
@click.option("--processes", default=1, show_default=True, help="So many cells at a time.")
def main(out: Path | None, against: Path | None, chosen: tuple[str, ...], cell: str | None, processes: int) -> None:
    if cell is not None:
        algorithm, what, *at = cell.split()
        record(Situation(algorithm, what, *map(int, at)), click.echo)
        return
    cells = [each for algorithm in chosen or gossip.ALGORITHMS for each in situations(algorithm)]
    with Pool(processes) as pool:
        found = {name: seen for name, seen, _ in pool.imap(record, cells, chunksize=8)}
    click.echo(f"{len(found)} cells of {len({each.algorithm for each in cells})} algorithms")
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    if against is not None:
        before = json.loads(against.read_text())
        before = {name: seen for name, seen in before.items() if not chosen or name.split()[0] in chosen}
        differing = [name for name in {**before, **found} if before.get(name) != found.get(name)]
        for name in differing:
            click.echo(f"{name}: {before.get(name, 'not there')} → {found.get(name, 'not there')}")
        click.echo(f"{len(found) - len(differing)} equal" if differing else "all equal")
        sys.exit(bool(differing))


if __name__ == "__main__":
    main()
