"""Records what peers do, to the byte, so that two states of the code can be compared.

    python -m tests.stress.recording --out before.json       # in one clone
    python -m tests.stress.recording --against before.json   # in another one, on the same machine
    python -m tests.stress.recording --cell "sgp join"       # every event of a cell, to be compared line by line

A cell is one algorithm in one situation: nothing happens, neighbours are late and left out, the process of a peer ends
at one of the operations on its disk, a peer joins, leaves or is lost. It has twenty rounds and a checkpoint every four.
Recorded are every frame, all effects of every call, every operation on every disk, and what the peers hold in the end.
Kernels and LAPACK may return other bits on another processor, so a recording is good for one machine.

`tests/cluster.py` calls the peers, and `round_peer` and `pair_peer` make them: where an interface changes, these alone
change. To compare with an older state, lay this file, the cluster, its disk and `tests/peers.py` beside its own tests.
"""

from __future__ import annotations

import json
import sys
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import count
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import click
import numpy as np
import xxhash

from peer import compress, gossip
from peer.compress.layout import Layout
from peer.gossip.base import GraphNeed
from peer.gossip.effects import Effects
from peer.gossip.late_neighbors import LatePolicy
from peer.gossip.membership import ChangeKind, Membership
from peer.gossip.topology import Schedule
from peer.gossip.views import ViewSchedule
from peer.node.disk_state import PeerRecovery
from peer.node.durable import DurablePeer
from peer.node.durable_pair import DurablePair
from peer.node.membership import MembershipRules
from peer.node.membership_planning import plan_change
from tests.cluster import Cluster, P, Pairs, Rounds
from tests.peers import Approach, compressor_of, drawn, durable, durable_pair, graph, node, participant
from tests.state.failing_disk import FailingDisk, ProcessEnds

LAYOUT = Layout.of_shapes(((7,), (3, 4), (1,)))
ROUNDS, SAVE_EVERY = 20, 4
FIRST, NEWCOMER = 4, 4
"""How many peers begin, and the number of the one that joins."""
_EACH: dict[str, Any] = {"rounds": ROUNDS, "theta": 0.02}
"""What each peer has: too small a θ at first, so that there are repairs."""
VICTIM = 1
"""The peer whose process ends, that is late, that leaves, and that is lost."""


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


# -- what the product's peers are made of ------------------------------------------------------------------------------


def round_peer(situation: Situation, me: int, disk: FailingDisk, numbers: int) -> DurablePeer:
    """Return a peer of an algorithm with rounds, one of so many `numbers`."""
    algorithm, changes, late = situation.algorithm, situation.changes_members, situation.late
    spec = gossip.ALGORITHMS[algorithm].spec
    kind = {GraphNeed.COLUMN: "exponential", GraphNeed.COMPLETE: "complete", GraphNeed.SERVER: "star"}
    symmetric = spec.graph in (GraphNeed.DOUBLY, GraphNeed.SYMMETRIC)

    def graph_of(members: tuple[int, ...]) -> Schedule:
        return graph(kind.get(spec.graph, "ring"), len(members), symmetric)

    first = graph_of(tuple(range(FIRST)))
    schedule = ViewSchedule(numbers, Membership(tuple(range(FIRST))), graph_of) if changes else first
    guard = 0.5 if late is not None or changes else 0.0
    made_from = node(algorithm, me, schedule, LAYOUT, compressor=compressor_of(spec), push_weight_guard=guard, **_EACH)
    lead = (first.diameter or FIRST) * first.cycle_rounds * (4 if late else 1) + 1
    made = participant(
        algorithm,
        made_from,
        drawn(99, LAYOUT.size),
        steps(me),
        max_lead=lead,
        late=late,
        membership_rules=MembershipRules(num_listed=numbers),
    )
    return durable(made, disk, numbers)


def pair_peer(algorithm: str, me: int, disk: FailingDisk) -> DurablePair:
    """Return a peer of an algorithm without rounds."""
    spec = gossip.ALGORITHMS[algorithm].spec
    code = compress.build("modulo", bits=4, rounding="dither", verified=True)
    compressor = code if spec.modulo else compress.build("none")
    made_from = node(algorithm, me, graph("ring", FIRST, True), LAYOUT, compressor=compressor, **_EACH)
    return durable_pair(algorithm, made_from, drawn(99, LAYOUT.size), steps(me), disk)


def steps(me: int) -> Approach:
    """Return the local steps of a peer."""
    return Approach(drawn(me, LAYOUT.size))


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

    @property
    def changes_members(self) -> bool:
        return self.what in ("join", "leave", "loss")

    @property
    def late(self) -> LatePolicy | None:
        return LatePolicy(after_s=12.0, max_skipped=2) if self.what == "skip" else None


class Recorded(Cluster[P]):
    """A cluster of which all is noted. A process that ends starts again at once."""

    def __init__(self, situation: Situation, trace: Trace) -> None:
        super().__init__(FIRST + (situation.what == "join"), situation.algorithm, ROUNDS)
        self.situation, self.trace = situation, trace
        self.seen: set[str] = set()
        """What was to happen, and has."""
        self.disks = {peer: FailingDisk(observe=partial(trace.add, peer)) for peer in self.disks}
        if situation.what == "end":
            self.disks[VICTIM].end_at, self.disks[VICTIM].torn = situation.at, 0.5
        self.start()

    def note(self, *event: object) -> None:
        self.trace.add(*event)

    def open(self, me: int) -> PeerRecovery:
        while True:
            try:
                recovery = super().open(me)
            except ProcessEnds:
                self.ended(me)
                continue
            self.note(me, "starts", self.peers[me].round, recovery.effects)
            return recovery

    def ended(self, me: int) -> None:
        self.note(me, "ends")
        self.seen.add("end")
        self.peers.pop(me, None)

    def do(self, me: int, call: Callable[[P], Effects]) -> None:
        try:
            self.perform(me, call(self.peers[me]))
        except ProcessEnds:
            self.ended(me)
            self.restart(me)

    def judge(self) -> None:
        """Note what the peers hold in the end."""
        what, name = self.situation.what, self.situation.name
        assert what in {"wait", *self.seen}, f"{name}: it never happened"
        for me, peer in sorted(self.peers.items()):
            if me not in self.dead:
                assert peer.round == ROUNDS or what == "leave", f"{name}: {me} ends at {peer.round}"
                arrays = {**peer.participant.algorithm.state(), **peer.participant.local_steps.state()}
                self.note(me, "holds", self.state(peer, {key: arrays[key] for key in sorted(arrays)}))

    @abstractmethod
    def state(self, peer: P, arrays: dict[str, object]) -> list[object]:
        """Return what is noted of a peer in the end."""


class RecordedRounds(Recorded[DurablePeer], Rounds):
    """Peers with rounds. Time passes with each event."""

    def make(self, me: int) -> DurablePeer:
        return round_peer(self.situation, me, self.disks[me], len(self.disks))

    def start(self) -> None:
        for me in self.disks:
            self.open(me)
            self.connect(me)

    def arrival(self, sender: int, frame: bytes) -> float:
        is_late = self.situation.late is not None and sender == VICTIM and self.peers[sender].round % 5 == 2
        return self.now + 40.0 * is_late

    def after(self, me: int, effects: Effects) -> None:
        if effects.skipped:
            self.seen.add("skip")
        if effects.finished is not None:
            peer = self.peers[me]
            is_synced = peer.round % 3 == 1
            saved = peer.round % SAVE_EVERY == 0
            self.confirm(me, peer.save({"seconds": self.now}) if saved else peer.sync() if is_synced else {})

    def run(self) -> None:
        for turn in count():
            self.now += 1.0
            self.disturb()
            asked = [self.last[me].wake_at for me in self.last]
            if not self.draw() and not any(self.queues.values()) and asked.count(None) == len(asked):
                break
            assert turn < 100_000, [(peer.round, peer.participant.session.waiting_for) for peer in self.peers.values()]
        self.judge()

    def deliver(self, sender: int, receiver: int) -> None:
        if sender in self.peers[receiver].participant.session.lost:
            # The link is closed.
            self.queues[sender, receiver].popleft()
        else:
            super().deliver(sender, receiver)

    def disturb(self) -> None:
        """Let the members change, each in its round."""
        what, rounds = self.situation.what, [peer.round for me, peer in self.peers.items() if me < FIRST]
        if not self.situation.changes_members or what in self.seen or min(rounds) < 4:
            return
        if what == "loss" and VICTIM not in self.dead:
            self.kill(VICTIM)
        if what == "loss" and any(self.may_begin(me) for me in range(FIRST) if me != VICTIM):
            return
        kind = {"join": ChangeKind.JOIN, "leave": ChangeKind.LEAVE, "loss": ChangeKind.LOST}[what]
        issuer = VICTIM if what == "leave" else 0
        subject = NEWCOMER if what == "join" else VICTIM
        self.seen.add(what)
        change = plan_change(self.peers[issuer].participant.membership, kind, subject, None)
        self.do(issuer, lambda peer: peer.announce(change, self.now))

    def state(self, peer: DurablePeer, arrays: dict[str, object]) -> list[object]:
        participant = peer.participant
        return [peer.round, participant.algorithm.u, participant.membership.changes, arrays]


class RecordedPairs(Recorded[DurablePair], Pairs):
    """Peers without rounds."""

    def make(self, me: int) -> DurablePair:
        return pair_peer(self.situation.algorithm, me, self.disks[me])

    def after(self, me: int, effects: Effects) -> None:
        if self.peers[me].round % SAVE_EVERY == 0:
            self.peers[me].save({"seconds": self.now})

    def run(self) -> None:
        super().run()
        self.judge()

    def read(self, peer: DurablePair) -> Effects:
        return peer.read(self.now)

    def state(self, peer: DurablePair, arrays: dict[str, object]) -> list[object]:
        return [peer.round, arrays]


# -- the program -------------------------------------------------------------------------------------------------------


def record(situation: Situation, tell: Callable[[str], None] | None = None) -> tuple[str, str, int]:
    """Return the name of a cell, what was recorded, and how many operations the disk of the victim saw."""
    trace = Trace(tell)
    cluster = (RecordedPairs if situation.is_in_pairs else RecordedRounds)(situation, trace)
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
