"""One run in which one peer lies to another, again and again, and what must hold all the same.

A run is done twice with the same seed. The first time nobody lies: what is said is kept, to make lies of, and so are
the models in the end. The second time, at some moments, a batch of lies is told:

- A lie that is refused may raise a RemoteProtocolError that names the liar, and nothing else, and leaves no trace: the
  digest of all that the peer consists of is the same after the batch (where it is not, lies of the batch are told again
  one by one to find those that left it). The peer goes on with the run after all batches, and the run ends with the
  bits of the first one.
- A lie that is taken, and changes something, has to be one that an honest peer could have told: of the kind, round,
  phase and weights that the liar would have sent then. Its run is followed, in a copy, to its end: no honest peer may
  raise anything, be blamed, or stand still without waiting for the liar; states can be saved; weights and memory stay
  bounded. Where refused lies came along with it, a second copy without those has to end with the same bits. In a run
  without rounds refusals are counted, and an exchange is given up after three: there the second copy has as many
  frames refused, but others.

With journals the same happens through disks: the digest holds the bytes of journal and checkpoints, a peer that was
lied to is restarted from its disk before it goes on, and comes back to where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from peer.compress.payload import Dense, LayerPayload, Levels, Residues, Sparse
from peer.errors import RemoteProtocolError
from peer.gossip.base import Memory
from peer.gossip.effects import Effects
from peer.gossip.membership import Change, ChangeKind
from peer.wire.message import Message, MessageKind
from tests.stress.meaning.circumstances import NUM_FIRST, Circumstances
from tests.stress.meaning.fingerprint import copied, fingerprint
from tests.stress.meaning.lies import Lie, Lies, Place
from tests.stress.meaning.report import Report
from tests.stress.meaning.worlds import PromiseBroken, World, build_world, refused_later

MOST_STATE_BYTES = 1 << 20
"""Of a peer of which a liar may fill the memory."""
_SEARCHED = 40
"""So many refused lies of a batch are looked at to find the one that left a trace."""
_FOLLOWED_SHARE = 0.03
"""A run is followed to its end for the first lie of a kind, and for this part of the others."""
_WEIGHT_ROOM = 2.0**-10
"""How much Σu may be above what the run began with, by rounding and newcomers without a sponsor."""
_MOST_FOLLOWED = 24
"""… but not for more than these in one trial."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much one run is to try."""

    moments: int
    """At which lies are told."""
    batches: int
    """At each of them; each begins with a peer whose budgets are whole."""
    lies: int
    """In a batch."""
    keeps_state: bool


MEMORY = Effort(moments=12, batches=5, lies=30, keeps_state=False)
JOURNAL = Effort(moments=8, batches=1, lies=20, keeps_state=True)


class Trial:
    """One seed of one algorithm."""

    def __init__(self, circumstances: Circumstances, seed: int, effort: Effort, report: Report) -> None:
        self._circumstances, self._seed, self._effort, self._report = circumstances, seed, effort, report
        self._random = Random(f"lies {seed} {circumstances}")
        self._told = Told(circumstances, seed, "journal" if effort.keeps_state else "memory", report)
        self._moments: dict[int, int] = {}
        """Turn → who is lied to then."""

    def run(self) -> None:
        """Do it. What breaks a promise goes to the report."""
        first = self._world()
        # Before it is known how long the run is: both runs restart the same peers at the same moments.
        span = 40 if self._circumstances.spec.asynchronous else 9 * self._circumstances.rounds
        turns = self._random.sample(range(2, span), min(self._effort.moments, span - 2))
        self._moments = {turn: self._random.randrange(NUM_FIRST) for turn in turns}
        first.records = True
        try:
            first.run(self._restarted)
        except Exception as error:
            self._told.find(error, "nobody lies yet")
            return
        honest = Honest.of(first)
        second = self._world()

        def between(world: World) -> None:
            self._lied_to(world, honest)

        try:
            second.run(between)
            if second.models() != first.models():
                raise PromiseBroken("after lies that were refused the run ends with other bits")
        except Exception as error:
            self._told.find(error, "after refused lies")

    def _world(self) -> World:
        return build_world(self._circumstances, self._seed, keeps_state=self._effort.keeps_state)

    def _restarted(self, world: World) -> None:
        victim = self._moments.get(world.turns)
        if victim is None or victim in world.dead:
            return
        if world.keeps_state:
            _restart(world, victim)
        else:
            # As after every refusal: what a liar was given leave for is not taken from the honest peer that it was.
            world.reconnect(victim)

    def _lied_to(self, world: World, honest: Honest) -> None:
        victim = self._moments.get(world.turns)
        if victim is None or victim in world.dead:
            return
        others = [peer for peer in range(world.num_peers) if peer != victim and peer not in world.dead]
        talking = [peer for peer in others if honest.said[peer, victim]]
        liar = self._random.choice(talking if talking and self._random.random() < 0.9 else others)
        scene = Scene(world, victim, liar, honest, self._told, self._random)
        for _ in range(self._effort.batches):
            scene.batch(self._effort.lies)
        self._restarted(world)


@dataclass(frozen=True)
class Honest:
    """What was said in a run in which everybody told the truth."""

    said: Mapping[tuple[int, int], Sequence[Message | Change]]
    """(sender, receiver) → in order."""
    slots: Mapping[tuple[int, int], Mapping[tuple[int, int], Message]]
    """(sender, receiver) → (round, phase) → message."""
    lost: Set[int]
    """Who was lost in that run, and would have said and heard more."""

    @classmethod
    def of(cls, world: World) -> Honest:
        """Return what a run has recorded."""
        messages = {pair: [each for each in said if isinstance(each, Message)] for pair, said in world.traffic.items()}
        slots = {pair: {(each.round, each.phase): each for each in said} for pair, said in messages.items()}
        return cls(dict(world.traffic), slots, frozenset(world.dead))


class Told:
    """What was told in one run, and what came of it."""

    def __init__(self, circumstances: Circumstances, seed: int, level: str, report: Report) -> None:
        self.circumstances, self.report = circumstances, report
        self._seed, self._level = seed, level
        self._followed: set[object] = set()
        """Kinds of lies."""
        self._left_to_follow = _MOST_FOLLOWED

    def find(self, error: BaseException, lie: str) -> None:
        """Take note of a broken promise."""
        self.report.find(str(self.circumstances), self._level, self._seed, error, lie)

    def is_followed(self, lie: Lie, random: Random) -> bool:
        """Return whether to follow a lie that was taken to the end of its run."""
        kind = (type(lie.said), lie.said.kind, lie.changes[:1])
        is_first = kind not in self._followed
        self._followed.add(kind)
        if self._left_to_follow == 0 or not (is_first or random.random() < _FOLLOWED_SHARE):
            return False
        self._left_to_follow -= 1
        self.report.followed[self.circumstances.algorithm] += 1
        return True


class Scene:
    """One moment of a run in which one peer lies to another."""

    def __init__(self, world: World, victim: int, liar: int, honest: Honest, told: Told, random: Random) -> None:
        self._world, self._victim, self._liar, self._told, self._random = world, victim, liar, told, random
        self._circumstances, self._report = told.circumstances, told.report
        self._slots = honest.slots[liar, victim]
        self._ends_early = not honest.lost.isdisjoint((liar, victim))
        self._shared = world.builder.shared
        self._pristine = world.peers[victim]
        self._before, _ = fingerprint(self._pristine, self._shared)
        self._next_number = world.next_number(victim, liar)
        asynchronous = self._circumstances.spec.asynchronous
        rounds = self._circumstances.rounds
        place = Place(liar, victim, world.round_of(victim), rounds, world.num_peers, asynchronous)
        self._lies = Lies(random, place, honest.said[liar, victim])

    def batch(self, count: int) -> None:
        """Tell so many lies. Afterwards the world has the peer that heard all that were refused."""
        self._begin_anew()
        refused: list[Lie] = []
        for _ in range(count):
            lie = self._lies.next()
            self._report.cases[self._circumstances.algorithm] += 1
            if self._is_refused(lie) or not self._has_changed():
                refused.append(lie)
                continue
            self._begin_anew()
            self._report.accepted[self._circumstances.algorithm] += 1
            try:
                self._judge(lie)
                if self._told.is_followed(lie, self._random):
                    self._follow(lie, refused[-2:])
            except Exception as error:
                self._told.find(error, str(lie))
        if self._print() != self._before:
            self._find_traces(refused)
            self._begin_anew()

    def _has_changed(self) -> bool:
        # What takes a number changes something; that costs less to see.
        number = self._world.next_number(self._victim, self._liar)
        return number != self._next_number or self._print() != self._before

    def _begin_anew(self) -> None:
        """Put a copy of the peer as it was in its place."""
        self._world.peers[self._victim] = copied(self._pristine, self._shared)

    def _print(self) -> int:
        digest, size = fingerprint(self._world.peers[self._victim], self._shared)
        self._report.largest_bytes = max(self._report.largest_bytes, size)
        return digest

    def _is_refused(self, lie: Lie) -> bool:
        """Tell a lie; return whether it was refused, or broke something, after which the peer is a new copy."""
        try:
            gave_up = refused_later(self._tell(lie))
        except RemoteProtocolError as error:
            self._report.refused(error.problem)
            cause = error.__cause__
            if error.peer != self._liar:
                problem: Exception = PromiseBroken(f"the lie is put down to peer {error.peer}: {error.problem}")
            elif isinstance(cause, Exception) and not isinstance(cause, RemoteProtocolError):
                # The peer lives, but nobody has judged this.
                problem = cause
            else:
                return True
        except Exception as error:
            problem = error
        else:
            if not gave_up:
                return False
            # After so many lies the exchange with the liar is over, and that is as it should be.
            self._report.refused(gave_up[0].problem)
            self._begin_anew()
            return True
        self._told.find(problem, str(lie))
        self._begin_anew()
        return True

    def _tell(self, lie: Lie, world: World | None = None) -> Effects:
        world, victim, liar = world or self._world, self._victim, self._liar
        return world.receive(victim, liar, lie.number(world.next_number(victim, liar)), lie.frame)

    def _find_traces(self, refused: Sequence[Lie]) -> None:
        """Find refused lies of a batch that left a trace."""
        for lie in self._random.sample(refused, min(len(refused), _SEARCHED)):
            problem = "a lie that changes nothing leaves a trace"
            self._begin_anew()
            try:
                self._tell(lie)
            except Exception as error:
                problem = f"a lie that was refused leaves a trace: {type(error).__name__}: {error}"
            if self._print() != self._before:
                self._told.find(PromiseBroken(problem), str(lie))

    # Lies that are taken.

    def _judge(self, lie: Lie) -> None:
        """Raise PromiseBroken unless an honest peer could have said what was taken."""
        said, circumstances = lie.said, self._circumstances
        if isinstance(said, Change):
            if said.kind is ChangeKind.LOST and said.subject == self._victim:
                raise PromiseBroken("a peer learns from another that it is lost itself")
            # A loss may be announced until the last round.
            beyond = self._world.rounds_after_end(self._victim) if said.kind is ChangeKind.LOST else 0
            if said.effective >= circumstances.rounds + beyond:
                raise PromiseBroken("a change of the members is taken whose round is not in the run")
            now = self._world.round_of(self._victim) + 1
            if said.effective <= now and self._world.changes_members(self._victim, said, now):
                raise PromiseBroken("a change of the members is taken whose round is past")
            return
        if said.kind is not MessageKind.REPAIR:
            _judge_values(said, of_factors=circumstances.spec.sends_factors)
        if circumstances.spec.asynchronous:
            if said.layers and said.kind is not MessageKind.REPAIR and abs(said.mixing_weight - 0.5) > 1e-9:
                raise PromiseBroken("a mixing weight is taken that is not that of a pair")
            self._judge_push_weight(said)
            return
        if said.kind not in (MessageKind.GOSSIP, MessageKind.PART, MessageKind.NOTHING):
            return
        if said.kind is not MessageKind.NOTHING:
            self._judge_push_weight(said)
        if self._world.is_early(self._victim, said.round):
            return  # Kept until its time comes, and judged then.
        slot = self._slots.get((said.round, said.phase))
        if slot is None and not self._is_said_after_loss(said):
            raise PromiseBroken("a message is taken for which there is no place in this run")
        if slot is None or circumstances.change is ChangeKind.LOST:
            return  # It may know of the loss already, or not yet.
        if all(abs(said.mixing_weight - weight) > 1e-9 for weight in self._weights(said, slot)):
            raise PromiseBroken("a mixing weight is taken that is not that of the round")

    def _is_said_after_loss(self, said: Message) -> bool:
        """Return whether it continues what was said until liar or victim was lost: nobody has to know of that yet."""
        if not self._ends_early:
            return False
        if not self._slots:  # One of the two was lost before a word was said.
            return self._world.builder.first.weight(said.round, self._victim, self._liar) > 0.0
        last_round = max(round_ for round_, _ in self._slots)
        return said.round > last_round and (last_round, said.phase) in self._slots

    def _weights(self, said: Message, slot: Message) -> tuple[float, ...]:
        """Return the mixing weights that an honest peer can tell in the place of `slot`."""
        circumstances, spec = self._circumstances, self._circumstances.spec
        if said.kind is MessageKind.NOTHING:
            return (0.0,)
        weight = slot.mixing_weight
        if circumstances.late and spec.push_sum:
            # Who was left out in the other run need not be in this one.
            weight = self._world.builder.first.weight(said.round, self._victim, self._liar)
        elif slot.kind is MessageKind.NOTHING:
            return (said.mixing_weight,)
        # A replica needs its difference also where its holder is given nothing.
        return (weight, 0.0) if spec.push_sum and spec.memory is Memory.REPLICAS else (weight,)

    def _judge_push_weight(self, said: Message) -> None:
        if not 0.0 < said.push_weight <= NUM_FIRST * (1.0 + _WEIGHT_ROOM):
            raise PromiseBroken("a push-sum weight is taken that the run cannot give")
        if said.push_weight != 1.0 and not self._circumstances.spec.push_sum:
            raise PromiseBroken("a push-sum weight is taken where there is none")

    def _follow(self, lie: Lie, refused: Sequence[Lie]) -> None:
        """Go on with a copy of the run in which the lie is taken."""
        models, _ = self._end_with(lie)
        if not refused or self._random.random() >= 0.3:
            return
        after_lies, num_refused = self._end_with(lie, after=refused)
        if self._circumstances.spec.asynchronous:
            models, _ = self._end_with(lie, after=[replace(lie, frame=b"")] * num_refused)
        if after_lies != models:
            raise PromiseBroken("lies that were refused change what comes of one that was taken")

    def _end_with(self, lie: Lie, after: Sequence[Lie] = ()) -> tuple[dict[int, bytes], int]:
        """Return the models of the honest peers at the end of a run with this lie, told after others that are refused
        or change nothing, and how many were refused."""
        copy = self._world.clone()
        copy.suspect = self._liar
        copy.was_changed = isinstance(lie.said, Change)
        num_refused = self._refuse(copy, after)
        # What the liar was already answered is not kept from the honest peer that goes on in its place.
        copy.reconnect(self._victim)
        self._take(copy, lie)
        if copy.keeps_state:
            copy.restart(self._victim)
        copy.run()
        copy.judge_state()
        for peer in copy.models():
            _, size = fingerprint(copy.peers[peer], self._shared)
            self._report.largest_bytes = max(self._report.largest_bytes, size)
            if size > MOST_STATE_BYTES:
                raise PromiseBroken("a peer that was lied to keeps too much")
            if copy.keeps_state:
                _restart(copy, peer)
        return copy.models(), num_refused

    def _refuse(self, world: World, lies: Sequence[Lie]) -> int:
        """Tell lies that are refused or change nothing, up to where the exchange with the liar is given up for them;
        return how many were refused."""
        num_refused = 0
        for lie in lies:
            try:
                effects = self._tell(lie, world)
            except RemoteProtocolError:
                num_refused += 1
                continue
            if refused_later(effects):
                world.perform(self._victim, effects)
                return num_refused + 1
        return num_refused

    def _take(self, world: World, lie: Lie) -> None:
        victim, liar = self._victim, self._liar
        following = world.next_number(victim, liar)
        number = lie.number(following)
        try:
            effects = world.receive(victim, liar, number, lie.frame)
        except RemoteProtocolError:
            return  # A refused one, after which the truth would come.
        if number and number == following:
            world.took(liar, victim, number)
        world.perform(victim, effects)


def _judge_values(said: Message, *, of_factors: bool) -> None:
    """Raise PromiseBroken for numbers that leave the range of float32 when a few are added up, divided by the push-sum
    weight that came with them."""
    most = float(np.finfo(np.float32).max) / (4 * NUM_FIRST) * min(1.0, said.push_weight)
    largest = max(map(_largest, said.layers), default=0.0)
    if said.kind is MessageKind.PART and of_factors:
        # The largest code with the largest exponent.
        exponents, codes = said.layers
        assert isinstance(exponents, Levels)
        assert isinstance(codes, Levels)
        code = float(np.abs(codes.codes.astype(np.int64) + codes.base).max())
        largest = code * 2.0 ** (float(exponents.codes.max()) + exponents.base)
    if largest > most:
        raise PromiseBroken("numbers are taken that cannot be added up")


def _largest(layer: LayerPayload) -> float:
    """Return the largest magnitude that a layer can hold; θ of residues."""
    if isinstance(layer, Residues):
        return layer.theta
    values = layer.values if isinstance(layer, Sparse) else layer
    if isinstance(values, Dense):
        return float(np.abs(values.values).max(initial=0.0))
    assert isinstance(values, Levels)
    # In the order in which they are computed: no step may leave the range.
    ends = np.array([values.base, values.base + values.step * ((1 << values.bits) - 1)], np.float32)
    return (
        float(np.abs(ends * np.float32(values.scale) / np.float32(values.divisor)).max()) if values.codes.size else 0.0
    )


def _restart(world: World, peer: int) -> None:
    before = world.progress(peer)
    world.restart(peer)
    if world.progress(peer) != before:
        raise PromiseBroken("a restart does not lead back to where the peer was")
