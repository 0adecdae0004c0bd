"""A few peers in one process, joined by queues: production peers with their journals, and no socket, clock or thread.

Which queue delivers next is drawn from a seed, so that peers run ahead of each other as far as they can. One peer may
be a suspect: what it is refused is a matter between it and the others, while an honest peer that is blamed, or stops
for anything but the suspect's silence, is a finding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from peer import wire
from peer.compress.payload import FloatArray
from peer.errors import ConfigError, RemoteError, RemoteProtocolError, StateError
from peer.gossip.effects import Effects
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.node import membership_codec
from peer.node.durable import DurablePeer
from peer.node.durable_pair import DurablePair
from peer.node.membership_planning import plan_change
from peer.wire.message import Message, MessageKind
from tests.state.failing_disk import FailingDisk
from tests.stress.meaning.circumstances import LAYOUT, NUM_FIRST, Builder, Circumstances, newcomer
from tests.stress.meaning.fingerprint import copied

Said = Message | Change
_MOST_TURNS = 6000
_SAVE_EVERY = 3


class PromiseBroken(Exception):
    """Something that must hold whatever one peer says did not hold."""


def refused_later(effects: Effects) -> Sequence[RemoteProtocolError]:
    """Return what a call refuses that did not come with it."""
    return getattr(effects, "refused", ())


@dataclass
class Frame:
    """What is on its way."""

    seq: int
    frame: bytes


Between = Callable[["World"], None]


class World(ABC):
    """All that runs with rounds and those without have in common."""

    def __init__(self, circumstances: Circumstances, seed: int, *, keeps_state: bool) -> None:
        """`keeps_state`: whether there are disks, checkpoints and restarts."""
        self.circumstances, self.seed, self.keeps_state = circumstances, seed, keeps_state
        self.builder = Builder(circumstances)
        self.random = Random(f"order {seed}")
        self.num_peers = circumstances.num_peers
        self.disks = [FailingDisk() for _ in range(self.num_peers)]
        self.queues: dict[tuple[int, int], deque[Frame]] = {
            (a, b): deque() for a in range(self.num_peers) for b in range(self.num_peers) if a != b
        }
        self.now = 0.0
        self.turns = 0
        self.suspect: int | None = None
        self.was_changed = False
        """Whether the suspect made the members change."""
        self.cut: set[tuple[int, int]] = set()
        """(suspect, receiver) that refused something of it: nothing goes over that link any more."""
        self.dead: set[int] = set()
        self.traffic: dict[tuple[int, int], list[Said]] = {pair: [] for pair in self.queues}
        """What was delivered, decoded: what lies are made of. Only kept where `records` is set."""
        self.records = False
        self._heard_last: dict[tuple[int, int], Message] = {}
        self._noted: dict[tuple[int, int], int] = {}

    def clone(self) -> World:
        """Return a copy that goes on by itself."""
        return copied(self, [*self.builder.shared, self.traffic])

    def run(self, between: Between = lambda world: None) -> None:
        """Go on until the run is over. `between` is called before everything that happens. Raises PromiseBroken."""
        while self.turns < _MOST_TURNS:
            self.turns += 1
            self.now += 1.0
            between(self)
            if not self._turn():
                self._judge_end()
                return
        raise PromiseBroken(f"after {_MOST_TURNS} turns the run is not over")

    def models(self) -> dict[int, bytes]:
        """Return the bits of the models of those that live, the suspect left out."""
        return {
            peer: self.x_of(peer).tobytes()
            for peer in range(self.num_peers)
            if peer not in self.dead and peer != self.suspect
        }

    def judge_state(self) -> None:
        """Raise PromiseBroken unless every honest peer is sound and can be saved and be loaded."""
        for peer in range(self.num_peers):
            if peer in self.dead or peer == self.suspect or not self.is_between_rounds(peer):
                continue
            self.check_state(peer)

    # What differs.

    @abstractmethod
    def open(self) -> None:
        """Start all peers."""

    @abstractmethod
    def receive(self, receiver: int, sender: int, seq: int, frame: bytes) -> Effects:
        """Give a peer a frame, and return what it asks for without doing it."""

    @abstractmethod
    def restart(self, peer: int) -> None:
        """End a process and start it again from its disk."""

    @abstractmethod
    def reconnect(self, peer: int) -> None:
        """Let the connections of a peer break and come back."""

    @abstractmethod
    def perform(self, peer: int, effects: Effects) -> None:
        """Send what a call asks for."""

    @abstractmethod
    def peer_object(self, peer: int) -> object:
        """Return the peer, to be compared and copied."""

    @abstractmethod
    def replace_peer(self, peer: int, by: object) -> None:
        """Put another object in the place of a peer."""

    @abstractmethod
    def x_of(self, peer: int) -> FloatArray: ...

    @abstractmethod
    def next_number(self, receiver: int, sender: int) -> int:
        """Return the number that the next frame of a sender has to have; 0 where frames have none."""

    @abstractmethod
    def round_of(self, peer: int) -> int: ...

    @abstractmethod
    def is_between_rounds(self, peer: int) -> bool: ...

    @abstractmethod
    def is_early(self, peer: int, round_: int) -> bool:
        """Return whether a peer keeps a message of that round for later: as if a power cut had set it back."""

    def rounds_after_end(self, peer: int) -> int:
        """Return for how many rounds after the last one a loss may be announced, as far as a peer can know."""
        return 0

    def changes_members(self, peer: int, change: Change, t: int) -> bool:
        """Return whether a change makes other members of round t, the next one of a member, than those it knows of."""
        return False

    @abstractmethod
    def check_state(self, peer: int) -> None:
        """Raise whatever is wrong with the state of a peer between two rounds."""

    @abstractmethod
    def progress(self, peer: int) -> tuple[object, ...]:
        """Return what a restart has to lead back to."""

    @abstractmethod
    def _turn(self) -> bool:
        """Let one thing happen; return whether there was any."""

    @abstractmethod
    def _judge_end(self) -> None:
        """Raise PromiseBroken where an honest peer was left behind, though nothing keeps it from going on."""

    # Deliveries.

    def deliver(self, receiver: int, sender: int, seq: int, frame: bytes) -> bool:
        """Give a peer a frame and do what it asks for; return whether it took it."""
        try:
            effects = self.receive(receiver, sender, seq, frame)
        except RemoteProtocolError as error:
            if sender != self.suspect:
                self.blamed(receiver, sender, error)
                return False
            if error.peer != self.suspect:
                raise PromiseBroken(f"the lie of the suspect is put down to peer {error.peer}: {error}") from error
            self.cut_off(receiver)
            return False
        except Exception as error:
            self.fell(receiver, error)
            return False
        self.perform(receiver, effects)
        return True

    def refuse_later(self, receiver: int, effects: Effects) -> None:
        """Take note of what a peer had kept, and refuses now."""
        for error in refused_later(effects):
            if self.suspect is None or error.peer != self.suspect:
                self.blamed(receiver, -1 if error.peer is None else error.peer, error)
            else:
                self.cut_off(receiver)

    def blamed(self, receiver: int, sender: int, error: RemoteProtocolError) -> None:
        """An honest peer was refused something: by the suspect at most."""
        if self.suspect is None:
            raise PromiseBroken(f"an honest peer is blamed: {error}") from error
        if receiver == self.suspect:
            return
        if error.peer == self.suspect:
            raise PromiseBroken(f"refused only when it was applied: {error.problem}")
        raise PromiseBroken(f"an honest peer is blamed for a lie of another: {error.problem}")

    def fell(self, peer: int, error: Exception) -> None:
        """A process ends with an error. A liar that falls over its own lies is no loss, and a newcomer whom a lie lets
        in by a sponsor that is not there has to ask again, as those have whose sponsor is lost."""
        is_newcomer = self.was_changed and peer >= NUM_FIRST and isinstance(error, StateError)
        if peer != self.suspect and not is_newcomer:
            raise error
        self.dead.add(peer)

    def cut_off(self, receiver: int) -> None:
        """End the link between the suspect and a peer that has refused something of it."""
        assert self.suspect is not None
        self.cut.add((self.suspect, receiver))
        self.queues[self.suspect, receiver].clear()

    @abstractmethod
    def took(self, sender: int, receiver: int, number: int) -> None:
        """Take note that a lie has taken a number: the liar's honest frames from there on get higher ones."""

    def put(self, sender: int, receiver: int, seq: int, frame: bytes) -> None:
        """Let a frame be on its way. What is sent to a newcomer that only a lie knows of goes nowhere."""
        if (sender, receiver) in self.queues and receiver not in self.dead and (sender, receiver) not in self.cut:
            self.queues[sender, receiver].append(Frame(seq, frame))

    def note(self, sender: int, receiver: int, delivered: Frame) -> None:
        """Take note of what was delivered, the first time."""
        frame, seq = delivered.frame, delivered.seq
        if not self.records or 0 < seq <= self._noted.get((sender, receiver), 0):
            return
        self._noted[sender, receiver] = max(seq, self._noted.get((sender, receiver), 0))
        if membership_codec.is_notice(frame):
            said: Said = membership_codec.decode(frame, self.num_peers, sender=sender)
        else:
            pair = sender, receiver
            said = wire.decode(frame, LAYOUT, dtype=np.float32, previous=self._heard_last.get(pair))
            if said.kind is MessageKind.GOSSIP and said.phase == 0:
                self._heard_last[pair] = said
        self.traffic[sender, receiver].append(said)


@dataclass
class _Plan:
    """What befalls the members, and how far it has come."""

    kind: ChangeKind | None
    subject: int
    at_round: int
    is_done: bool = False


class RoundsWorld(World):
    """A run in rounds."""

    def __init__(self, circumstances: Circumstances, seed: int, *, keeps_state: bool) -> None:
        super().__init__(circumstances, seed, keeps_state=keeps_state)
        self.peers = [self._make(peer) for peer in range(self.num_peers)]
        self.wake_at: list[float | None] = [None] * self.num_peers
        self._taken: dict[tuple[int, int], list[int]] = {}
        """(liar, receiver) → numbers that lies have taken, ascending: its honest frames get higher ones."""
        joins = circumstances.change is ChangeKind.JOIN
        self._plan = _Plan(circumstances.change, NUM_FIRST if joins else self.random.randrange(NUM_FIRST), 1)

    def _make(self, peer: int) -> DurablePeer:
        return self.builder.peer(peer, self.disks[peer])

    def open(self) -> None:
        for peer in self.peers:
            peer.open()
        for one in range(self.num_peers):
            self._connect(one)

    def _connect(self, one: int) -> None:
        """Let a peer and all others that live say hello; what was on its way between them is gone."""
        for other in range(self.num_peers):
            if other == one or {one, other} & self.dead:
                continue
            for a, b in ((one, other), (other, one)):
                self.peers[a].links.meet(b)
                self.peers[b].links.meet(a)
                self.queues[a, b].clear()
                if a in self.peers[b].participant.session.lost or b in self.peers[a].participant.session.lost:
                    continue
                has = self._honest_number(a, b, self.peers[b].links.durable_from(a))
                for seq, frame in self.peers[a].connected(b, has):
                    self.put(a, b, seq, frame)

    def restart(self, peer: int) -> None:
        self.disks[peer].restart()
        self.peers[peer] = self._make(peer)
        recovery = self.peers[peer].open()
        self.wake_at[peer] = recovery.effects.wake_at
        self._connect(peer)

    def reconnect(self, peer: int) -> None:
        self._connect(peer)

    def receive(self, receiver: int, sender: int, seq: int, frame: bytes) -> Effects:
        return self.peers[receiver].receive(sender, seq, frame, self.now)

    def perform(self, peer: int, effects: Effects) -> None:
        durable = self.peers[peer]
        self.wake_at[peer] = effects.wake_at
        self.refuse_later(peer, effects)
        for outgoing in durable.publish(effects):
            self.put(peer, outgoing.receiver, outgoing.seq, outgoing.frame)
        if effects.finished is None:
            self._confirm(peer, effects.receipts)
        elif self.keeps_state and durable.round % _SAVE_EVERY == peer % _SAVE_EVERY:
            self._confirm(peer, {**effects.receipts, **durable.save({})})
        else:
            # Without receipts, receivers would count as silent, and what is kept for them would grow.
            self._confirm(peer, {**effects.receipts, **durable.sync()})

    def _confirm(self, peer: int, receipts: dict[int, int]) -> None:
        for sender, upto in receipts.items():
            upto = self._honest_number(sender, peer, upto)
            if upto > 0 and sender not in self.dead and upto < self.peers[sender].links.out[peer].next_seq:
                self.peers[sender].receipt(peer, upto)

    def peer_object(self, peer: int) -> DurablePeer:
        return self.peers[peer]

    def replace_peer(self, peer: int, by: object) -> None:
        assert isinstance(by, DurablePeer)
        self.peers[peer] = by

    def x_of(self, peer: int) -> FloatArray:
        algorithm = self.peers[peer].participant.algorithm
        x: FloatArray = np.append(algorithm.x.astype(np.float64), algorithm.u)
        return x

    def next_number(self, receiver: int, sender: int) -> int:
        durable = self.peers[receiver]
        durable.links.meet(sender)
        return durable.links.incoming[sender].last_seq + 1

    def took(self, sender: int, receiver: int, number: int) -> None:
        self._taken.setdefault((sender, receiver), []).append(number)

    def _told_number(self, sender: int, receiver: int, seq: int) -> int:
        """Return the number under which a frame is told that an honest peer would number `seq`."""
        for number in self._taken.get((sender, receiver), ()) if seq else ():
            seq += seq >= number
        return seq

    def _honest_number(self, sender: int, receiver: int, told: int) -> int:
        """Return up to which of its own frames a receiver has what was told up to a number."""
        return told - sum(number <= told for number in self._taken.get((sender, receiver), ()))

    def round_of(self, peer: int) -> int:
        return self.peers[peer].round

    def is_between_rounds(self, peer: int) -> bool:
        return not self.peers[peer].participant.session.in_round

    def is_early(self, peer: int, round_: int) -> bool:
        return self.peers[peer].participant.session.is_early(round_)

    def rounds_after_end(self, peer: int) -> int:
        return 6 * self.peers[peer].participant.membership.longest_lead + 6

    def changes_members(self, peer: int, change: Change, t: int) -> bool:
        known = self.peers[peer].participant.membership.changes
        first = tuple(range(NUM_FIRST))
        before = Membership(first, known)
        # Who has left has no rounds any more that a change could be too late for.
        is_member = peer in before.members(t - 1)
        return is_member and Membership(first, (*known, change)).members(t) != before.members(t)

    def check_state(self, peer: int) -> None:
        self.peers[peer].save({}, anew=True)
        algorithm = self.peers[peer].participant.algorithm
        if not np.isfinite(algorithm.x).all():
            raise PromiseBroken("the model of an honest peer is not finite")
        if not 0.0 < algorithm.u <= NUM_FIRST * (1.0 + 1e-6):
            raise PromiseBroken("an honest peer has a push-sum weight that the run cannot have given it")

    def progress(self, peer: int) -> tuple[object, ...]:
        durable = self.peers[peer]
        session, links = durable.participant.session, durable.links
        algorithm = durable.participant.algorithm
        return (
            algorithm.x.tobytes(),
            algorithm.u,
            session.round,
            session.in_round,
            session.waiting_for,
            links.received(),
            durable.participant.membership.changes,
        )

    def _turn(self) -> bool:
        self._plan_change()
        able = [peer for peer in self._living() if self._can_begin(peer)]
        waiting = [pair for pair, queue in self.queues.items() if queue and pair[1] not in self.dead]
        due = [
            peer
            for peer in self._living()
            if (wake_at := self.wake_at[peer]) is not None and self.now >= wake_at and not self.is_between_rounds(peer)
        ]
        if due:
            self._call(due[0], lambda: self.peers[due[0]].timer(self.now))
        elif able and (not waiting or self.random.random() < 0.3):
            peer = self.random.choice(able)
            self._call(peer, lambda: self._begin(peer))
        elif waiting:
            sender, receiver = self.random.choice(waiting)
            on_its_way = self.queues[sender, receiver].popleft()
            seq = self._told_number(sender, receiver, on_its_way.seq)
            if self.deliver(receiver, sender, seq, on_its_way.frame):
                self.note(sender, receiver, on_its_way)
        else:
            later = [wake_at for peer in self._living() if (wake_at := self.wake_at[peer]) is not None]
            later = [wake_at for wake_at in later if wake_at > self.now]
            if not later:
                return False
            self.now = min(later)
        return True

    def _living(self) -> list[int]:
        return [peer for peer in range(self.num_peers) if peer not in self.dead]

    def _can_begin(self, peer: int) -> bool:
        participant = self.peers[peer].participant
        return (
            participant.membership.is_member
            and not participant.session.in_round
            and participant.round < self.circumstances.rounds
        )

    def _begin(self, peer: int) -> Effects:
        self.peers[peer].step()
        return self.peers[peer].begin(self.now)

    def _call(self, peer: int, call: Callable[[], Effects]) -> None:
        """Let a peer do something of its own accord."""
        try:
            effects = call()
        except RemoteError as error:
            if peer != self.suspect:
                raise PromiseBroken(f"refused only when it was applied: {error.problem}") from error
            self.dead.add(peer)
            return
        except Exception as error:
            self.fell(peer, error)
            return
        self.perform(peer, effects)

    def _plan_change(self) -> None:
        plan = self._plan
        if plan.kind is None or plan.is_done or max(map(self.round_of, self._living())) < plan.at_round:
            return
        plan.is_done = True
        subject = plan.subject
        issuer = subject
        if plan.kind is ChangeKind.LOST:
            self.dead.add(subject)
            for pair, queue in self.queues.items():
                if pair[1] == subject:
                    queue.clear()
        if plan.kind is not ChangeKind.LEAVE:
            able = [
                peer
                for peer in self._living()
                if self.peers[peer].participant.membership.is_member
                and (
                    plan.kind is ChangeKind.JOIN or self.peers[peer].participant.session.last_heard(subject) is not None
                )
            ]
            if not able and self.suspect is not None:
                return
            issuer = able[0]
        joins_unlisted = plan.kind is ChangeKind.JOIN and subject >= self.circumstances.num_listed
        durable = self.peers[issuer]
        try:
            change = plan_change(
                durable.participant.membership, plan.kind, subject, newcomer(subject) if joins_unlisted else None
            )
        except ConfigError:
            if self.suspect is None:
                raise
            return
        self._call(issuer, lambda: durable.announce(change, self.now))

    def blamed(self, receiver: int, sender: int, error: RemoteProtocolError) -> None:
        if self.was_changed or sender in self.peers[receiver].participant.session.lost:
            return
        super().blamed(receiver, sender, error)

    def _judge_end(self) -> None:
        behind = [
            peer
            for peer in self._living()
            if peer != self.suspect
            and self.peers[peer].participant.membership.is_member
            and self.round_of(peer) < self.circumstances.rounds
        ]
        if not behind or self.was_changed:
            return
        waits_for = {peer: self.peers[peer].participant.session.waiting_for for peer in behind}
        if self.suspect is not None and any(self.suspect in waited for waited in waits_for.values()):
            return
        raise PromiseBroken(f"honest peers stand still in rounds {[*map(self.round_of, behind)]}: {waits_for}")


class PairsWorld(World):
    """A run without rounds."""

    def __init__(self, circumstances: Circumstances, seed: int, *, keeps_state: bool) -> None:
        super().__init__(circumstances, seed, keeps_state=keeps_state)
        self.peers = [self._make(peer) for peer in range(self.num_peers)]
        self.last = [Effects() for _ in range(self.num_peers)]

    def _make(self, peer: int) -> DurablePair:
        return self.builder.pair(peer, self.disks[peer])

    def open(self) -> None:
        for peer in self.peers:
            peer.open()

    def receive(self, receiver: int, sender: int, seq: int, frame: bytes) -> Effects:
        return self.peers[receiver].receive(sender, frame, self.now)

    def restart(self, peer: int) -> None:
        self.disks[peer].restart()
        self.peers[peer] = self._make(peer)
        self.last[peer] = self.peers[peer].open().effects
        self._connect(peer)

    def reconnect(self, peer: int) -> None:
        for other in range(self.num_peers):
            if other != peer and other not in self.dead:
                self.perform(peer, self.peers[peer].disconnected(other))
        self._connect(peer)

    def _connect(self, peer: int) -> None:
        for other in range(self.num_peers):
            if other == peer or other in self.dead:
                continue
            self.queues[peer, other].clear()
            self.queues[other, peer].clear()
            self.perform(other, self.peers[other].disconnected(peer))
            for a, b in ((peer, other), (other, peer)):
                request = self.last[a].open_request
                if request is not None and request.receiver == b:
                    self.put(a, b, 0, request.frame)

    def perform(self, peer: int, effects: Effects) -> None:
        self.last[peer] = effects
        self.refuse_later(peer, effects)
        for outgoing in effects.frames:
            self.put(peer, outgoing.receiver, 0, outgoing.frame)

    def peer_object(self, peer: int) -> DurablePair:
        return self.peers[peer]

    def replace_peer(self, peer: int, by: object) -> None:
        assert isinstance(by, DurablePair)
        self.peers[peer] = by

    def x_of(self, peer: int) -> FloatArray:
        return self.peers[peer].participant.algorithm.x

    def next_number(self, receiver: int, sender: int) -> int:
        return 0

    def took(self, sender: int, receiver: int, number: int) -> None:
        """Nothing is numbered."""

    def round_of(self, peer: int) -> int:
        return self.peers[peer].round

    def is_between_rounds(self, peer: int) -> bool:
        return not self.peers[peer].participant.in_iteration

    def is_early(self, peer: int, round_: int) -> bool:
        return False

    def check_state(self, peer: int) -> None:
        self.peers[peer].save({})
        if not np.isfinite(self.x_of(peer)).all():
            raise PromiseBroken("the model of an honest peer is not finite")

    def progress(self, peer: int) -> tuple[object, ...]:
        participant = self.peers[peer].participant
        return (
            participant.algorithm.x.tobytes(),
            participant.round,
            participant.in_iteration,
            participant.open_partner,
        )

    def _turn(self) -> bool:
        for me in self.random.sample(range(self.num_peers), self.num_peers):
            if me not in self.dead and self._turn_of(me):
                return True
        return False

    def _turn_of(self, me: int) -> bool:
        durable = self.peers[me]
        participant = durable.participant
        waiting = [sender for sender in range(self.num_peers) if sender != me and self.queues[sender, me]]
        wake_at = self.last[me].wake_at
        if waiting and self.random.random() < 0.7:
            sender = self.random.choice(waiting)
            on_its_way = self.queues[sender, me].popleft()
            if self.deliver(me, sender, 0, on_its_way.frame):
                self.note(sender, me, on_its_way)
        elif wake_at is not None and self.now >= wake_at:
            self._call(me, lambda: durable.timer(self.now))
        elif participant.in_iteration:
            durable.compute()
            self._call(me, lambda: durable.step(self.now))
            if self.keeps_state and participant.round % 2 == 0 and me not in self.dead:
                durable.save({})
        elif participant.round < self.circumstances.rounds and participant.can_read:
            self._call(me, lambda: durable.read(0.0))
        else:
            return bool(waiting)
        return True

    def _call(self, peer: int, call: Callable[[], Effects]) -> None:
        try:
            self.perform(peer, call())
        except Exception as error:
            self.fell(peer, error)

    def _judge_end(self) -> None:
        behind = {
            peer: participant.open_partner
            for peer, participant in enumerate(each.participant for each in self.peers)
            if peer not in self.dead and peer != self.suspect and participant.round < self.circumstances.rounds
        }
        if not behind or (self.suspect is not None and self.suspect in behind.values()):
            return
        raise PromiseBroken(f"honest peers stand still, with requests open to {behind}")


def build_world(circumstances: Circumstances, seed: int, *, keeps_state: bool) -> World:
    """Return a run, started."""
    kind = PairsWorld if circumstances.spec.asynchronous else RoundsWorld
    world: World = kind(circumstances, seed, keeps_state=keeps_state)
    world.open()
    for disk in world.disks:
        disk.forgets = not keeps_state
    return world
