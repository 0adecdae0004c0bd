"""A few peers in one process, joined by queues: production peers with their journals, and no socket, clock or thread.

Which queue delivers next is drawn from a seed, so that peers run ahead of each other as far as they can. One peer may
be a suspect: what it is refused is a matter between it and the others, while an honest peer that is blamed, or stops
for anything but the suspect's silence, is a finding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from tests.cluster import Cluster, OnItsWay, P, Pairs, Rounds
from tests.peers import newcomer
from tests.stress.meaning.circumstances import LAYOUT, NUM_FIRST, Builder, Circumstances
from tests.stress.meaning.fingerprint import copied

Said = Message | Change
_MOST_TURNS = 6000
_SAVE_EVERY = 3


class PromiseBroken(Exception):
    """Something that must hold whatever one peer says did not hold."""


def refused_later(effects: Effects) -> Sequence[RemoteProtocolError]:
    """Return what a call refuses that did not come with it."""
    return getattr(effects, "refused", ())


class _World(Cluster[P]):
    """All that runs with rounds and those without have in common."""

    def __init__(self, circumstances: Circumstances, seed: int, *, keeps_state: bool) -> None:
        """`keeps_state`: whether there are disks, checkpoints and restarts."""
        super().__init__(circumstances.num_peers, f"order {seed}", circumstances.rounds)
        self.circumstances, self.seed, self.keeps_state = circumstances, seed, keeps_state
        self.builder = Builder(circumstances)
        self.num_peers = circumstances.num_peers
        self.turns = 0
        self.suspect: int | None = None
        self.was_changed = False
        """Whether the suspect made the members change."""
        numbers = range(self.num_peers)
        self.traffic: dict[tuple[int, int], list[Said]] = {(a, b): [] for a in numbers for b in numbers if a != b}
        """What was delivered, decoded: what lies are made of. Only kept where `records` is set."""
        self.queues = {pair: deque() for pair in self.traffic}
        self.records = False
        self._heard_last: dict[tuple[int, int], Message] = {}
        self._noted: dict[tuple[int, int], int] = {}

    def clone(self) -> World:
        """Return a copy that goes on by itself."""
        return copied(self, [*self.builder.shared, self.traffic])

    def run(self, between: Callable[[World], None] = lambda world: None) -> None:
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
    def reconnect(self, peer: int) -> None:
        """Let the connections of a peer break and come back."""

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

    def deliver(self, sender: int, receiver: int) -> None:
        on_its_way = self.queues[sender, receiver].popleft()
        if self.takes(receiver, sender, self.told_number(sender, receiver, on_its_way.seq), on_its_way.frame):
            self.heard(sender, receiver, on_its_way)

    def told_number(self, sender: int, receiver: int, seq: int) -> int:
        """Return the number under which a frame is told that an honest peer would number `seq`."""
        return seq

    def takes(self, receiver: int, sender: int, seq: int, frame: bytes) -> bool:
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

    def put(self, sender: int, receiver: int, frame: OnItsWay) -> None:
        """Let a frame be on its way. What is sent to a newcomer that only a lie knows of goes nowhere."""
        if (sender, receiver) in self.queues:
            super().put(sender, receiver, frame)

    def heard(self, sender: int, receiver: int, delivered: OnItsWay) -> None:
        """Take note of what was delivered, the first time."""
        seq, frame, _ = delivered
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


World = _World[Any]


@dataclass
class _Plan:
    """What befalls the members, and how far it has come."""

    kind: ChangeKind | None
    subject: int
    at_round: int
    is_done: bool = False


class RoundsWorld(_World[DurablePeer], Rounds):
    """A run in rounds."""

    def __init__(self, circumstances: Circumstances, seed: int, *, keeps_state: bool) -> None:
        super().__init__(circumstances, seed, keeps_state=keeps_state)
        self._taken: dict[tuple[int, int], list[int]] = {}
        """(liar, receiver) → numbers that lies have taken, ascending: its honest frames get higher ones."""
        joins = circumstances.change is ChangeKind.JOIN
        self._plan = _Plan(circumstances.change, NUM_FIRST if joins else self.random.randrange(NUM_FIRST), 1)

    def make(self, me: int) -> DurablePeer:
        return self.builder.peer(me, self.disks[me])

    def hello(self, sender: int, receiver: int) -> None:
        one, other = self.peers[sender], self.peers[receiver]
        if sender not in other.participant.session.lost and receiver not in one.participant.session.lost:
            has = self._honest_number(sender, receiver, other.links.durable_from(sender))
            for seq, frame in one.connected(receiver, has):
                self.put(sender, receiver, OnItsWay(seq, frame, self.now))

    def reconnect(self, peer: int) -> None:
        self.connect(peer)

    def perform(self, me: int, effects: Effects) -> None:
        self.refuse_later(me, effects)
        super().perform(me, effects)

    def after(self, me: int, effects: Effects) -> None:
        if effects.finished is None:
            return
        durable = self.peers[me]
        is_saved = self.keeps_state and durable.round % _SAVE_EVERY == me % _SAVE_EVERY
        # Without receipts, receivers would count as silent, and what is kept for them would grow.
        self.confirm(me, durable.save({}) if is_saved else durable.sync())

    def confirm(self, me: int, receipts: Mapping[int, int]) -> None:
        for sender, told in receipts.items():
            upto = self._honest_number(sender, me, told)
            if upto > 0 and sender not in self.dead and upto < self.peers[sender].links.out[me].next_seq:
                self.peers[sender].links.acknowledge(me, upto)

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

    def told_number(self, sender: int, receiver: int, seq: int) -> int:
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
        if self.draw():
            return True
        later = [wake_at for peer in self.living() if (wake_at := self.last[peer].wake_at) is not None]
        later = [wake_at for wake_at in later if wake_at > self.now]
        if later:
            self.now = min(later)
        return bool(later)

    def is_due(self, me: int) -> bool:
        return super().is_due(me) and not self.is_between_rounds(me)

    def do(self, me: int, call: Callable[[DurablePeer], Effects]) -> None:
        try:
            effects = call(self.peers[me])
        except RemoteError as error:
            if me != self.suspect:
                raise PromiseBroken(f"refused only when it was applied: {error.problem}") from error
            self.dead.add(me)
            return
        except Exception as error:
            self.fell(me, error)
            return
        self.perform(me, effects)

    def _plan_change(self) -> None:
        plan = self._plan
        if plan.kind is None or plan.is_done or max(map(self.round_of, self.living())) < plan.at_round:
            return
        plan.is_done = True
        subject = plan.subject
        issuer = subject
        if plan.kind is ChangeKind.LOST:
            self.kill(subject)
        if plan.kind is not ChangeKind.LEAVE:
            able = [
                peer
                for peer in self.living()
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
        self.do(issuer, lambda peer: peer.announce(change, self.now))

    def blamed(self, receiver: int, sender: int, error: RemoteProtocolError) -> None:
        if self.was_changed or sender in self.peers[receiver].participant.session.lost:
            return
        super().blamed(receiver, sender, error)

    def _judge_end(self) -> None:
        behind = [
            peer
            for peer in self.living()
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


class PairsWorld(_World[DurablePair], Pairs):
    """A run without rounds."""

    def make(self, me: int) -> DurablePair:
        return self.builder.pair(me, self.disks[me])

    def reconnect(self, peer: int) -> None:
        for other in self.others(peer):
            self.perform(peer, self.peers[peer].disconnected(other))
        self.connect(peer)

    def perform(self, me: int, effects: Effects) -> None:
        self.refuse_later(me, effects)
        super().perform(me, effects)

    def after(self, me: int, effects: Effects) -> None:
        if self.keeps_state and self.peers[me].round % 2 == 0:
            self.peers[me].save({})

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
        return any(me not in self.dead and self.turn(me) for me in self.sample())

    def do(self, me: int, call: Callable[[DurablePair], Effects]) -> None:
        try:
            super().do(me, call)
        except Exception as error:
            self.fell(me, error)

    def _judge_end(self) -> None:
        behind = {
            peer: participant.open_partner
            for peer, participant in ((peer, each.participant) for peer, each in self.peers.items())
            if peer not in self.dead and peer != self.suspect and participant.round < self.circumstances.rounds
        }
        if not behind or (self.suspect is not None and self.suspect in behind.values()):
            return
        raise PromiseBroken(f"honest peers stand still, with requests open to {behind}")


def build_world(circumstances: Circumstances, seed: int, *, keeps_state: bool) -> World:
    """Return a run, started."""
    kind = PairsWorld if circumstances.spec.asynchronous else RoundsWorld
    world: World = kind(circumstances, seed, keeps_state=keeps_state)
    world.start()
    for disk in world.disks.values():
        disk.forgets = not keeps_state
    return world
