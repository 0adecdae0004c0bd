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
  bounded. Where refused lies came along with it, a second copy without those has to end with the same bits.

With journals the same happens through disks: the digest holds the bytes of journal and checkpoints, a peer that was
lied to is restarted from its disk before it goes on, and comes back to where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from peer.errors import RemoteProtocolError
from peer.gossip.membership import Change, ChangeKind
from peer.wire.message import Message, MessageKind
from tests.stress.meaning.circumstances import NUM_FIRST, Circumstances
from tests.stress.meaning.fingerprint import copied, fingerprint
from tests.stress.meaning.lies import Lie, Lies, Place
from tests.stress.meaning.report import Report
from tests.stress.meaning.worlds import PromiseBroken, World, build_world

MOST_STATE_BYTES = 1 << 20
"""Of a peer of which a liar may fill the memory."""
_SEARCHED = 40
"""So many refused lies of a batch are looked at to find the one that left a trace."""
_FOLLOWED_SHARE = 0.03
"""A run is followed to its end for the first lie of a kind, and for this part of the others."""
_MOST_FOLLOWED = 24
"""… but not for more than these in one trial."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much one run is to try."""

    batches: int
    lies_per_batch: int
    keeps_state: bool


MEMORY = Effort(batches=12, lies_per_batch=150, keeps_state=False)
JOURNAL = Effort(batches=8, lies_per_batch=20, keeps_state=True)


class Trial:
    """One seed of one algorithm."""

    def __init__(self, circumstances: Circumstances, seed: int, effort: Effort, report: Report) -> None:
        self._circumstances, self._seed, self._effort, self._report = circumstances, seed, effort, report
        self._random = Random(f"lies {seed} {circumstances}")
        self._level = "journal" if effort.keeps_state else "memory"
        self._honest: dict[tuple[int, int], Sequence[Message | Change]] = {}
        self._slots: dict[tuple[int, int], dict[tuple[int, int], Message]] = {}
        self._moments: dict[int, int] = {}
        """Turn → who is lied to then."""
        self._followed: set[object] = set()
        """Kinds of lies."""
        self._left_to_follow = _MOST_FOLLOWED

    def run(self) -> None:
        """Do it. What breaks a promise goes to the report."""
        first = self._world()
        # Before it is known how long the run is: both runs restart the same peers at the same moments.
        span = 40 if self._circumstances.spec.asynchronous else 9 * self._circumstances.rounds
        turns = self._random.sample(range(2, span), min(self._effort.batches, span - 2))
        self._moments = {turn: self._random.randrange(NUM_FIRST) for turn in turns}
        first.records = True
        first.run(self._restarted)
        self._honest = dict(first.traffic)
        for pair, said in first.traffic.items():
            self._slots[pair] = {(m.round, m.phase): m for m in said if isinstance(m, Message)}
        second = self._world()
        try:
            second.run(self._lied_to)
            if second.models() != first.models():
                raise PromiseBroken("after lies that were refused the run ends with other bits")
        except Exception as error:
            self._find(error, "after refused lies")

    def _world(self) -> World:
        return build_world(self._circumstances, self._seed, keeps_state=self._effort.keeps_state)

    def _restarted(self, world: World) -> None:
        victim = self._moments.get(world.turns)
        if victim is not None and self._effort.keeps_state and victim not in world.dead:
            before = world.progress(victim)
            world.restart(victim)
            if world.progress(victim) != before:
                raise PromiseBroken("a restart does not lead back to where the peer was")

    def _lied_to(self, world: World) -> None:
        victim = self._moments.get(world.turns)
        if victim is None or victim in world.dead:
            return
        others = [peer for peer in range(world.num_peers) if peer != victim]
        talking = [peer for peer in others if self._honest[peer, victim] and peer not in world.dead]
        liar = self._random.choice(talking if talking and self._random.random() < 0.9 else others)
        self._batch(world, victim, liar)
        self._restarted(world)

    # A batch.

    def _batch(self, world: World, victim: int, liar: int) -> None:
        shared = world.builder.shared
        pristine = world.peer_object(victim)
        place = Place(
            liar,
            victim,
            world.round_of(victim),
            self._circumstances.rounds,
            world.num_peers,
            self._circumstances.spec.asynchronous,
        )
        lies = Lies(self._random, place, self._honest[liar, victim])
        before, _ = fingerprint(pristine, shared)
        world.replace_peer(victim, copied(pristine, shared))
        refused: list[Lie] = []
        for _ in range(self._effort.lies_per_batch):
            lie = lies.next()
            self._report.cases[self._circumstances.algorithm] += 1
            if self._is_refused(world, victim, liar, lie):
                refused.append(lie)
                continue
            after, size = fingerprint(world.peer_object(victim), shared)
            self._report.largest_bytes = max(self._report.largest_bytes, size)
            if after == before:
                refused.append(lie)
                continue
            world.replace_peer(victim, copied(pristine, shared))
            self._report.accepted[self._circumstances.algorithm] += 1
            try:
                self._judge(world, victim, liar, lie)
                if self._is_followed(lie):
                    self._follow(world, victim, liar, lie, refused[-2:])
            except Exception as error:
                self._find(error, str(lie))
        after, size = fingerprint(world.peer_object(victim), shared)
        self._report.largest_bytes = max(self._report.largest_bytes, size)
        if after != before:
            self._find_traces(world, victim, liar, refused, pristine)
            world.replace_peer(victim, copied(pristine, shared))

    def _is_refused(self, world: World, victim: int, liar: int, lie: Lie) -> bool:
        """Tell a lie; return whether it was refused, or broke something, after which the peer is a new copy."""
        try:
            self._tell(world, victim, liar, lie)
        except RemoteProtocolError as error:
            self._report.refused(error.problem)
            if error.peer == liar:
                return True
            problem: Exception = PromiseBroken(f"the lie is put down to peer {error.peer}: {error.problem}")
        except Exception as error:
            problem = error
        else:
            return False
        self._find(problem, str(lie))
        return True

    def _tell(self, world: World, victim: int, liar: int, lie: Lie) -> None:
        seq = 0 if lie.skipped is None else max(0, world.next_number(victim, liar) + lie.skipped)
        world.receive(victim, liar, seq, lie.frame)

    def _find_traces(self, world: World, victim: int, liar: int, refused: Sequence[Lie], pristine: object) -> None:
        """Find the refused lies of a batch that left a trace."""
        shared = world.builder.shared
        before, _ = fingerprint(pristine, shared)
        for lie in self._random.sample(refused, min(len(refused), _SEARCHED)):
            problem = "a lie that changes nothing leaves a trace"
            world.replace_peer(victim, copied(pristine, shared))
            try:
                self._tell(world, victim, liar, lie)
            except Exception as error:
                problem = f"a lie that was refused leaves a trace: {type(error).__name__}: {error}"
            if fingerprint(world.peer_object(victim), shared)[0] != before:
                self._find(PromiseBroken(problem), str(lie))

    # Lies that are taken.

    def _judge(self, world: World, victim: int, liar: int, lie: Lie) -> None:
        """Raise PromiseBroken unless an honest peer could have said what was taken."""
        said, circumstances = lie.said, self._circumstances
        if isinstance(said, Change):
            if said.kind is ChangeKind.LOST and said.subject == victim:
                raise PromiseBroken("a peer learns from another that it is lost itself")
            if not world.round_of(victim) < said.effective < circumstances.rounds:
                raise PromiseBroken("a change of the members is taken whose round is past, or not in the run")
            return
        if circumstances.spec.asynchronous:
            self._judge_pair(said)
            return
        if said.kind not in (MessageKind.GOSSIP, MessageKind.NOTHING):
            return
        if said.kind is MessageKind.GOSSIP:
            self._judge_push_weight(said)
        slot = self._slots[liar, victim].get((said.round, said.phase))
        if slot is None:
            raise PromiseBroken("a message is taken for which there is no place in this run")
        weights = said.mixing_weight, slot.mixing_weight
        if said.kind is slot.kind and abs(weights[0] - weights[1]) > 1e-9:
            raise PromiseBroken("a mixing weight is taken that is not that of the round")

    def _judge_pair(self, said: Message) -> None:
        if said.layers and said.kind is not MessageKind.REPAIR and said.mixing_weight != 0.5:
            raise PromiseBroken("a mixing weight is taken that is not that of a pair")
        self._judge_push_weight(said)

    def _judge_push_weight(self, said: Message) -> None:
        if not 0.0 < said.push_weight <= NUM_FIRST * (1.0 + 1e-6):
            raise PromiseBroken("a push-sum weight is taken that the run cannot give")
        if said.push_weight != 1.0 and not self._circumstances.spec.push_sum:
            raise PromiseBroken("a push-sum weight is taken where there is none")

    def _is_followed(self, lie: Lie) -> bool:
        kind = (type(lie.said), lie.said.kind, lie.changes[:1])
        is_first = kind not in self._followed
        self._followed.add(kind)
        return self._left_to_follow > 0 and (is_first or self._random.random() < _FOLLOWED_SHARE)

    def _follow(self, world: World, victim: int, liar: int, lie: Lie, refused: Sequence[Lie]) -> None:
        """Go on with a copy of the run in which the lie is taken."""
        self._left_to_follow -= 1
        self._report.followed[self._circumstances.algorithm] += 1
        ends = []
        for lies in ((*refused, lie), (lie,)) if refused and self._random.random() < 0.3 else ((lie,),):
            copy = world.clone()
            copy.suspect = liar
            copy.was_changed = isinstance(lie.said, Change)
            for each in lies:
                self._take(copy, victim, liar, each)
            if self._effort.keeps_state:
                copy.restart(victim)
            copy.run()
            copy.judge_state()
            for peer in copy.models():
                _, size = fingerprint(copy.peer_object(peer), copy.builder.shared)
                self._report.largest_bytes = max(self._report.largest_bytes, size)
                if size > MOST_STATE_BYTES:
                    raise PromiseBroken("a peer that was lied to keeps too much")
            if self._effort.keeps_state:
                for peer in copy.models():
                    self._restart(copy, peer)
            ends.append(copy.models())
        if len(ends) == 2 and ends[0] != ends[1]:
            raise PromiseBroken("lies that were refused change what comes of one that was taken")

    @staticmethod
    def _restart(world: World, peer: int) -> None:
        before = world.progress(peer)
        world.restart(peer)
        if world.progress(peer) != before:
            raise PromiseBroken("after a lie that was taken, a restart does not lead back to where the peer was")

    def _take(self, world: World, victim: int, liar: int, lie: Lie) -> None:
        number = world.next_number(victim, liar)
        seq = 0 if lie.skipped is None else max(0, number + lie.skipped)
        try:
            effects = world.receive(victim, liar, seq, lie.frame)
        except RemoteProtocolError:
            return  # A refused one, after which the truth would come.
        if seq and seq == number:
            world.shift(liar, victim)
        world.perform(victim, effects)

    def _find(self, error: BaseException, lie: str) -> None:
        self._report.find(str(self._circumstances), self._level, self._seed, error, lie)
