"""A cluster in one process: production peers, with journals on disks in memory, joined by queues: no socket, no clock.

The next to do something is drawn (`Rounds.draw`), or all take turns (`turn`), in pairs in an order that is drawn. A
class for a test says what its peers are made of (`make`), when they save (`after`) and how time passes (`now`). Peers
on a virtual clock, which wait for their disks and for streams that break, are in `tests/stress/faults`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Generic, NamedTuple, TypeVar

from peer.gossip.effects import Effects
from peer.node.disk_state import PeerRecovery
from peer.node.durable import DurablePeer
from peer.node.durable_pair import DurablePair
from tests.state.failing_disk import FailingDisk

P = TypeVar("P", DurablePeer, DurablePair)


class OnItsWay(NamedTuple):
    """A frame of a queue."""

    seq: int
    """0 where frames have no numbers."""
    frame: bytes
    arrives_at: float = 0.0


class Cluster(ABC, Generic[P]):
    """Processes of peers, which can end and start again."""

    def __init__(self, numbers: int, seed: int | str, upto: int) -> None:
        """`upto`: the round at which peers stop."""
        self.random, self.upto, self.now = Random(seed), upto, 0.0
        self.disks = {peer: FailingDisk() for peer in range(numbers)}
        self.peers: dict[int, P] = {}
        self.queues: dict[tuple[int, int], deque[OnItsWay]] = {}
        """(sender, receiver) → what is on its way, in order."""
        self.last: dict[int, Effects] = {}
        """What each peer asked for last: when to call its timer, and its open request."""
        self.dead: set[int] = set()
        self.cut: set[tuple[int, int]] = set()
        """(sender, receiver) of what never arrives from now on."""

    @abstractmethod
    def make(self, me: int) -> P:
        """Return a peer that has not read its disk yet."""

    @abstractmethod
    def connect(self, me: int) -> None:
        """Let a peer and all others that live meet; what was on its way between them is gone."""

    @abstractmethod
    def perform(self, me: int, effects: Effects) -> None:
        """Do what a call asks for."""

    @abstractmethod
    def receive(self, me: int, sender: int, seq: int, frame: bytes) -> Effects:
        """Give a peer a frame, and return what it asks for without doing it."""

    def open(self, me: int) -> PeerRecovery:
        """Start a process: it recovers what is on its disk."""
        peer = self.make(me)
        recovery = peer.open(lambda effects: self.repeated(me, peer))
        self.peers[me], self.last[me] = peer, recovery.effects
        return recovery

    def start(self) -> None:
        """Start every process."""
        for me in self.disks:
            self.open(me)

    def restart(self, me: int) -> PeerRecovery:
        """Start the process of a peer again, after it ended."""
        self.disks[me].restart()
        recovery = self.open(me)
        self.connect(me)
        return recovery

    def kill(self, me: int) -> None:
        """End a peer for good. What it has sent and is on its way arrives."""
        self.dead.add(me)
        self.queues = {pair: queue for pair, queue in self.queues.items() if pair[1] != me}

    def others(self, me: int) -> list[int]:
        """Return the others that live, ascending; none if the peer does not live itself."""
        return [] if me in self.dead else sorted(self.peers.keys() - {me} - self.dead)

    def do(self, me: int, call: Callable[[P], Effects]) -> None:
        """Let a peer do something, and what comes of it."""
        self.perform(me, call(self.peers[me]))

    def after(self, me: int, effects: Effects) -> None:
        """Save or sync, if it is time, once all that a call asks for is done."""

    def repeated(self, me: int, peer: P) -> None:
        """Take note of a round or step that a peer has repeated from its journal."""

    def note(self, *event: object) -> None:
        """Take note of an event."""

    def put(self, sender: int, receiver: int, frame: OnItsWay) -> None:
        """Let a frame be on its way."""
        if receiver not in self.dead and (sender, receiver) not in self.cut:
            self.queues[sender, receiver].append(frame)

    def deliver(self, sender: int, receiver: int) -> None:
        """Let the oldest frame of a queue arrive."""
        seq, frame, _ = self.queues[sender, receiver].popleft()
        self.do(receiver, lambda _: self.receive(receiver, sender, seq, frame))

    def arrived(self, receivers: Iterable[int]) -> list[tuple[int, int]]:
        """Return the queues to these peers from which a frame may be taken."""
        to = set(receivers)
        return [pair for pair, queue in self.queues.items() if pair[1] in to and queue and queue[0][2] <= self.now]

    def living(self) -> list[int]:
        """Return the peers that live, in the order in which they were started first."""
        return [me for me in self.peers if me not in self.dead]

    def is_due(self, me: int) -> bool:
        """Return whether a peer wants its timer called."""
        wake_at = self.last[me].wake_at
        return wake_at is not None and self.now >= wake_at


class Rounds(Cluster[DurablePeer]):
    """Peers of an algorithm with rounds."""

    def start(self) -> None:
        super().start()
        for me in self.peers:
            self.connect(me)

    def connect(self, me: int) -> None:
        for other in self.others(me):
            for a, b in ((me, other), (other, me)):
                self.peers[a].links.meet(b)
                self.peers[b].links.meet(a)
                self.queues[a, b] = deque()
                self.hello(a, b)

    def hello(self, sender: int, receiver: int) -> None:
        """Send again what a receiver has not for good."""
        frames = self.peers[sender].connected(receiver, self.peers[receiver].links.durable_from(sender))
        self.note(sender, "meets", receiver, frames)
        for seq, frame in frames:
            self.put(sender, receiver, OnItsWay(seq, frame, self.now))

    def perform(self, me: int, effects: Effects) -> None:
        self.note(me, "asks", effects)
        self.last[me] = effects
        for outgoing in self.peers[me].publish(effects):
            self.note(me, "sends", outgoing.receiver, outgoing.seq, outgoing.frame)
            arrives_at = self.arrival(me, outgoing.frame)
            self.put(me, outgoing.receiver, OnItsWay(outgoing.seq, outgoing.frame, arrives_at))
        self.confirm(me, effects.receipts)
        self.after(me, effects)

    def arrival(self, sender: int, frame: bytes) -> float:
        """Return when a frame arrives that is sent now."""
        return self.now

    def confirm(self, me: int, receipts: Mapping[int, int]) -> None:
        """Tell others up to which frame a peer has theirs for good."""
        self.note(me, "has", receipts)
        for sender, upto in receipts.items():
            if sender in self.peers and sender not in self.dead:
                self.peers[sender].links.acknowledge(me, upto)

    def receive(self, me: int, sender: int, seq: int, frame: bytes) -> Effects:
        return self.peers[me].receive(sender, seq, frame, self.now)

    def begin(self, me: int) -> None:
        """Let a peer take its local step and begin a round."""

        def begin(peer: DurablePeer) -> Effects:
            peer.step()
            return peer.begin(self.now)

        self.do(me, begin)

    def timer(self, me: int) -> None:
        self.do(me, lambda peer: peer.timer(self.now))

    def may_begin(self, me: int) -> bool:
        participant = self.peers[me].participant
        is_free = participant.membership.is_member and not participant.session.in_round
        return is_free and participant.round < self.upto

    def draw(self) -> bool:
        """Let one thing happen, so that peers run ahead of each other as far as they can; return whether there was
        any."""
        living = self.living()
        due = [me for me in sorted(living) if self.is_due(me)]
        able, arrived = list(filter(self.may_begin, living)), self.arrived(living)
        if due:
            self.timer(due[0])
        elif able and (not arrived or self.random.random() < 0.3):
            self.begin(self.random.choice(able))
        elif arrived:
            self.deliver(*self.random.choice(arrived))
        else:
            return False
        return True

    def turn(self, me: int) -> bool:
        """Let a peer do one thing; return whether it has something to do."""
        if arrived := self.arrived([me]):
            self.deliver(*arrived[0])
        elif self.peers[me].participant.session.in_round:
            if self.is_due(me):
                self.timer(me)
        elif self.may_begin(me):
            self.begin(me)
        else:
            return False
        return True


class Pairs(Cluster[DurablePair]):
    """Peers of an algorithm without rounds, in which two exchange at a time."""

    def start(self) -> None:
        super().start()
        self.queues = {(a, b): deque() for a in self.peers for b in self.peers if a != b}

    def connect(self, me: int) -> None:
        for other in self.others(me):
            self.queues[me, other].clear()
            self.queues[other, me].clear()
            self.perform(other, self.peers[other].disconnected(me))
            for a, b in ((me, other), (other, me)):
                request = self.last[a].open_request
                if request is not None and request.receiver == b and not self.queues[a, b]:
                    self.put(a, b, OnItsWay(0, request.frame, self.now))

    def perform(self, me: int, effects: Effects) -> None:
        self.note(me, "asks", effects)
        self.last[me] = effects
        for outgoing in effects.frames:
            self.note(me, "sends", outgoing.receiver, outgoing.frame)
            self.put(me, outgoing.receiver, OnItsWay(0, outgoing.frame, self.now))
        if effects.finished is not None:
            self.after(me, effects)

    def receive(self, me: int, sender: int, seq: int, frame: bytes) -> Effects:
        return self.peers[me].receive(sender, frame, self.now)

    def sample(self) -> list[int]:
        """Draw in which order the peers take their turns."""
        return self.random.sample(range(len(self.peers)), len(self.peers))

    def run(self) -> None:
        """Go on until every peer has taken its steps and nothing is on its way."""
        for _ in range(100_000):
            self.now += 1.0
            busy = [self.turn(me) for me in self.sample()]
            waiting = [peer.participant.open_partner for peer in self.peers.values()]
            if not any(busy) and not any(self.queues.values()) and waiting.count(None) == len(waiting):
                return
        raise AssertionError([(peer.round, peer.participant.open_partner) for peer in self.peers.values()])

    def turn(self, me: int) -> bool:
        """Let a peer do one thing; return whether there was any."""
        participant, arrived = self.peers[me].participant, self.arrived([me])
        if arrived and self.random.random() < 0.7:
            self.deliver(*self.random.choice(arrived))
        elif self.is_due(me):
            self.do(me, lambda peer: peer.timer(self.now))
        elif participant.in_iteration:
            self.do(me, self.step)
        elif participant.round < self.upto and participant.can_read:
            self.do(me, self.read)
        else:
            return bool(arrived)
        return True

    def read(self, peer: DurablePair) -> Effects:
        """Let a peer begin a local step."""
        return peer.read(0.0)

    def step(self, peer: DurablePair) -> Effects:
        """Let a peer end its local step."""
        peer.participant.compute()
        return peer.step(self.now)
