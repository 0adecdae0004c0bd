"""What must hold whatever happens: mass, agreement of replicas, every message once, the bits of the undisturbed run.

The auditor sees everything, which no peer does: states after rounds, frames as they were put on a stream, and whose
messages were applied in which round. Crashes undo rounds; what a peer does again replaces what is known of it, and has
to be the same wherever the first time could have been seen by others.

Members come and go: shares that one hands to another stay in the sum of those that take part. A peer that is lost for
good is outside of it from the start. What the others have gone up by what they applied of it, and down by what they
gave it and did not get back: to the last bit of u, in every round, whichever of that the lost peer ever had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from peer import wire
from peer.compress.decompress import add_decompressed_
from peer.compress.float_types import floats_of
from peer.compress.payload import Dense
from peer.gossip.boundary import UNSPONSORED_WEIGHT
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.gossip.mixing import local_step_rate
from peer.gossip.replicas import replicas_of
from peer.node.participant import Participant
from peer.wire.message import Message
from tests.stress.faults.scenario import RoundState, Scenario, state_of
from tests.stress.faults.undisturbed import UndisturbedRun

_U_TOLERANCE = 1e-9
_X_TOLERANCE = 2e-4
"""Float32 rounding of a hundred rounds stays a hundred times below this; a lost message is a hundred times above."""
_X_TOLERANCE_OF_RETURNS = 5e-3
"""The same where copies in bfloat16 come back from a lost peer: less 2⁻⁷ of a few numbers of a few rounds."""


class InvariantBroken(AssertionError):
    """Something happened that must never happen; the text says what."""


Vector: TypeAlias = "npt.NDArray[np.float64] | float"
"""A sum of vectors; 0.0 while it is empty."""
Share: TypeAlias = tuple[Vector, float]
"""(x, u)"""


@dataclass
class _Round:
    """What one peer did in one round."""

    moved: Vector = 0.0
    """What its local step added to x."""
    applied: list[tuple[int, int]] = field(default_factory=list)
    """(round, sender) of messages whose effect is in the state after it."""
    took: list[int] = field(default_factory=list)
    """Who handed it a share at the end of the round."""
    sent: dict[int, Share] = field(default_factory=dict)
    """Receiver → what the message is to bring it, where that is asked for."""
    gave: dict[int, Share] = field(default_factory=dict)
    """Taker → what it is handed as members change."""
    state: RoundState | None = None


@dataclass(frozen=True)
class _Balance:
    """What must be the case between two rounds."""

    x: Vector
    """What Σx is to be, with what is in flight."""
    u: float
    flying_x: Vector
    flying_u: float


class Auditor:
    """Watches one simulated run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.checked_rounds = 0
        self.membership = Membership(tuple(range(scenario.num_first)))
        """With every change that anybody knows."""
        self._outside = scenario.lost_subject(scenario.happenings)
        """Who is lost for good, sooner or later."""
        self._push_sum = scenario.spec.push_sum
        self._undisturbed = None if scenario.case.late or scenario.is_two_faced else UndisturbedRun(scenario)
        self._told_otherwise: dict[tuple[int, int], Share] = {}
        """(receiver, round) → what the liar's message brings it beyond what the honest one would."""
        self._rounds: list[dict[int, _Round]] = [{} for _ in range(scenario.num_peers)]
        self._open: list[_Round] = [_Round() for _ in range(scenario.num_peers)]
        self._frames: dict[tuple[int, int, int], bytes] = {}
        """(sender, receiver, number) → digest of the frame that has this number."""
        self._last_words: dict[tuple[int, int], tuple[Share | None, Share | None]] = {}
        """(receiver, round) → what the lost peer sent and gave it, whether or not it came to the end of that round."""
        self._returned: dict[tuple[int, int, bool], int] = {}
        """(peer, round, whether it was a share as members changed) of what was on its way to the lost peer → before the
        end of which round the peer takes it back."""
        self._own_replicas: dict[tuple[int, int], bytes] = {}
        """(peer, differences that it holds) → digest of the peer's own replica."""
        self._applied: list[set[tuple[int, int]]] = [set() for _ in range(scenario.num_peers)]
        """(round, sender) of every message that is in a peer's state."""
        inside = [peer for peer in range(scenario.num_first) if peer != self._outside]
        self._balances = [_Balance(len(inside) * scenario.x0.astype(np.float64), float(len(inside)), 0.0, 0.0)]
        """What Σx and Σu have to be at the start and after every round that was checked, and what is in flight."""

    @property
    def completed(self) -> int:
        """How many rounds all members have completed, by what is known now; without the peer that will be lost."""
        t = len(self._balances) - 1
        while t < self.scenario.rounds and all(t in self._rounds[peer] for peer in self._inside(t)):
            t += 1
        return t

    @property
    def furthest(self) -> int:
        """How many rounds the peer that is furthest has completed."""
        return max(max(rounds, default=-1) + 1 for rounds in self._rounds)

    def began(self, peer: int) -> None:
        """A process of a peer starts, and will go back to some state."""
        self._open[peer] = _Round()

    def stepped(self, participant: Participant, round_: int, rate: float, gradient: npt.NDArray[np.float32]) -> None:
        """A local step is about to be applied."""
        self._undo(participant.peer, round_)
        algorithm = participant.algorithm
        step = local_step_rate(rate, algorithm.u, algorithm.node.push_weight_guard) if algorithm.spec.push_sum else rate
        moved = -step * gradient.astype(np.float64)
        if algorithm.node.drift_gain is not None:
            moved += step * algorithm.state()["drift.correction"].astype(np.float64)
        self._open[participant.peer].moved = moved

    def observed(self, participant: Participant, what: str, round_: int, other: int, frame: bytes) -> None:
        """What `Participant` says of a frame: see there."""
        peer = participant.peer
        if what == "applied":
            self._open[peer].applied.append((round_, other))
        elif what == "took":
            self._open[peer].took.append(other)
        elif what == "returned":
            is_share = self._decoded(frame).phase != 0
            self._returned[peer, round_, is_share] = participant.round + participant.session.in_round
            self._check_returned()
        else:
            self._undo(peer, round_)
            entry = self._open[peer]
            if what == "gave":
                message = self._decoded(frame)
                entry.gave[other] = self._value(message), message.push_weight
            elif self.scenario.case.late or (self._outside in (peer, other) and self.scenario.conserves_sum):
                entry.sent[other] = self._contribution(participant, self._decoded(frame))
            if peer == self._outside:
                self._last_words[other, round_] = entry.sent.get(other), entry.gave.get(other)

    def put_on_stream(self, sender: int, receiver: int, seq: int, frame: bytes) -> None:
        """A numbered frame is given to a stream: the first time, or again."""
        digest = hashlib.blake2b(frame, digest_size=16).digest()
        if self._frames.setdefault((sender, receiver, seq), digest) != digest:
            raise InvariantBroken(f"peer {sender} sent peer {receiver} two different frames under number {seq}")

    def told_otherwise(self, participant: Participant, receiver: int, honest: Message, said: Message) -> None:
        """The liar says something else to a neighbour than what its own model is. Of an algorithm without replicas."""
        x, u = self._contribution(participant, honest)
        other_x, other_u = self._contribution(participant, said)
        self._told_otherwise[receiver, honest.round] = self._of_kind((other_x - x, other_u - u))

    def round_done(self, participant: Participant) -> None:
        """A peer has completed a round."""
        peer, t = participant.peer, participant.round - 1
        self._undo(peer, t)
        entry, self._open[peer] = self._open[peer], _Round()
        entry.state = state = state_of(participant)
        if peer != self._outside:
            self._learn(participant.membership.changes)  # What the lost peer says last may reach nobody.
        if self._rounds[peer] and t - 1 not in self._rounds[peer]:
            raise InvariantBroken(f"peer {peer} completed round {t} after {max(self._rounds[peer])}")
        self._check_undisturbed(participant, t, state)
        # A modulo message whose repair was needed is listed once for each part, and parts of sums once for each phase.
        several = participant.algorithm.spec.modulo or participant.algorithm.spec.exchanges > 1
        for pair in set(entry.applied) if several else entry.applied:
            if pair in self._applied[peer]:
                raise InvariantBroken(f"peer {peer} applied the message of peer {pair[1]}, round {pair[0]}, twice")
            self._applied[peer].add(pair)
        self._rounds[peer][t] = entry
        if self._outside in entry.took or any(sender == self._outside for _, sender in entry.applied):
            self._check_returned()
        self._check_replicas(participant)
        for done in range(len(self._balances) - 1, self.completed):
            self._check_mass(done)
            self.checked_rounds = max(self.checked_rounds, done + 1)

    def finish(self, participants: Sequence[Participant]) -> None:
        """All peers are done, have taken what came late, and owe nobody anything: nothing is in flight any more."""
        rounds = self.scenario.rounds
        if self.completed != rounds:
            raise InvariantBroken(f"all peers ended after {self.completed} of {rounds} rounds")
        members = self.membership.members(rounds)
        inside = [each for each in participants if each.peer in members and each.peer != self._outside]
        sum_u, expected = sum(each.algorithm.u for each in inside), self._balances[-1].u
        if self.scenario.case.late:
            # What came after the receiver's last round is in no round's account.
            late = (
                told
                for (peer, t), told in self._told_otherwise.items()
                if (t, self.scenario.liar) not in self._applied[peer]
            )
            expected += sum(u for _, u in late)
        if abs(sum_u - expected) > _U_TOLERANCE:
            raise InvariantBroken(f"Σu is {sum_u} in the end, of {expected}")
        for participant in participants:
            if participant.peer in members:
                self._check_undisturbed(participant, rounds - 1, state_of(participant))

    def _learn(self, changes: Sequence[Change]) -> None:
        completed = len(self._balances) - 1
        for change in changes:
            members = self.membership.members(completed)
            if self.membership.add(change) and self.membership.members(completed) != members:
                raise InvariantBroken(f"{change} was heard of when all had completed {completed} rounds")

    def _inside(self, t: int) -> Iterator[int]:
        """Yield who takes part in round t, or in the exchange at its end, and is not lost, ever."""
        for peer in range(self.scenario.num_peers):
            if peer != self._outside and any(peer in self.membership.members(round_) for round_ in (t, t + 1)):
                yield peer

    def _undo(self, peer: int, round_: int) -> None:
        """Forget the rounds from `round_` on: the peer does them again."""
        rounds = self._rounds[peer]
        if not rounds or max(rounds) < round_:
            return
        for undone in [t for t in rounds if t >= round_]:
            self._applied[peer].difference_update(rounds.pop(undone).applied)
        del self._balances[round_ + 1 :]

    def _decoded(self, frame: bytes) -> Message:
        return wire.decode(frame, self.scenario.layout)

    def _value(self, message: Message) -> Vector:
        """Return what a payload decompresses to, exactly."""
        if all(isinstance(layer, Dense) for layer in message.layers):
            return np.concatenate([layer.values for layer in message.layers]).astype(np.float64)  # type: ignore[union-attr]
        value = np.zeros(self.scenario.layout.size)
        add_decompressed_(value, message.layers, self.scenario.layout)
        return value

    def _contribution(self, participant: Participant, message: Message) -> Share:
        algorithm = participant.algorithm
        rate = getattr(algorithm, "averaging_rate", lambda t: algorithm.node.averaging_rate)(message.round)
        replicas = replicas_of(algorithm)
        value = self._value(message) if replicas is None else floats_of(replicas.own).astype(np.float64)
        weight = rate * message.mixing_weight
        return weight * value, weight * message.push_weight

    def _check_undisturbed(self, participant: Participant, t: int, state: RoundState) -> None:
        """Where nobody is lost, a peer is what it would be if nothing had gone wrong."""
        if self._undisturbed is None or any(
            change.kind is ChangeKind.LOST for change in participant.membership.changes
        ):
            return
        for change in participant.membership.changes if participant.peer != self._outside else ():
            self._undisturbed.follow(change)
        expected = self._undisturbed.after(participant.peer, t)
        if expected is None or state.digest != expected.digest:
            raise InvariantBroken(f"peer {participant.peer} is not what it would be undisturbed after round {t}")

    def _check_replicas(self, participant: Participant) -> None:
        """A copy that holds the first k differences of a peer is what that peer's own copy was then, to the bit."""
        replicas = getattr(participant.algorithm, "replicas", None)
        if replicas is None:
            return
        peer = participant.peer
        own = replicas.own.tobytes()
        if self._own_replicas.setdefault((peer, participant.round), own) != own:
            raise InvariantBroken(f"peer {peer} told others of another replica in round {participant.round - 1} before")
        for sender, count in zip(replicas.senders, replicas.state()["replica.rounds"].tolist(), strict=True):
            known = self._own_replicas.get((sender, count))
            # The sender may not have ended that round yet: then it is compared when it has, by the receivers' next.
            if known is not None and sender != peer and known != replicas.of[sender].tobytes():
                raise InvariantBroken(f"peer {peer} holds another replica of peer {sender} after {count} differences")

    def _check_returned(self) -> None:
        """Nothing returns that the lost peer had when it made a message, or gave a share, which anybody has."""
        if not self._returned or self._outside is None:
            return
        inside = [peer for peer in range(self.scenario.num_peers) if peer != self._outside]
        heard = max((t for peer in inside for t, sender in self._applied[peer] if sender == self._outside), default=-1)
        rounds = (each for peer in inside for each in self._rounds[peer].items())
        heard = max([heard, *(t + 1 for t, entry in rounds if self._outside in entry.took)])
        for peer, t, _ in self._returned:
            if t < heard:
                raise InvariantBroken(
                    f"peer {peer} took back what it sent the lost peer in round {t}, and what that peer sent in round "
                    f"{heard}, or gave just before, holds it"
                )

    def _check_mass(self, t: int) -> None:
        """Σx and Σu after round t of every peer, with what was sent by then and not applied by then."""
        before = self._balances[t]
        expected = [before.x, before.u]
        flying = [before.flying_x, before.flying_u]
        inside = list(self._inside(t))
        for peer in inside:
            entry = self._rounds[peer][t]
            expected[0] = expected[0] + entry.moved
            for round_, sender in entry.applied:
                if sender == self.scenario.liar and (peer, round_) in self._told_otherwise:
                    _add(expected, [self._told_otherwise[peer, round_]])
            if self.scenario.case.late:
                _add(flying, entry.sent.values())
                _add(flying, [self._rounds[sender][round_].sent[peer] for round_, sender in entry.applied], -1.0)
            elif self._outside is not None and self.scenario.conserves_sum:
                _add(expected, self._from_outside(peer, t, entry))
                _add(expected, self._to_outside(peer, t, entry), -1.0)
            if self._push_sum:
                _add(expected, self._unsponsored(peer, t, entry))
            else:
                _add(expected, self._change_of_mean(peer, t, entry))
        balance = _Balance(expected[0], float(expected[1]), flying[0], float(flying[1]))
        self._balances.append(balance)
        staying = [peer for peer in inside if peer in self.membership.members(t + 1)]
        states = [state for peer in staying if (state := self._rounds[peer][t].state) is not None]
        if self.scenario.spec.exchanges > 1 and not self._parts_are_missing(t):
            models = {state.x.tobytes() for state in states}
            if len(models) > 1:
                raise InvariantBroken(f"there are {len(models)} models after round {t}, where all take the same sums")
        sum_x: Vector = sum((state.x for state in states), np.zeros(self.scenario.layout.size))
        sum_u = sum(state.u for state in states)
        if abs(sum_u + balance.flying_u - balance.u) > _U_TOLERANCE:
            raise InvariantBroken(f"Σu is {sum_u} after round {t} and {balance.flying_u} in flight, of {balance.u}")
        off = float(np.abs(sum_x + balance.flying_x - balance.x).max())
        is_rounded = self.scenario.case.in_bfloat16 and self._outside is not None
        tolerance = _X_TOLERANCE_OF_RETURNS if is_rounded else _X_TOLERANCE
        if off > tolerance * self.scenario.num_peers and self.scenario.conserves_sum:
            raise InvariantBroken(f"Σx is off by {off:.3g} after round {t}, with what is in flight")

    def _parts_are_missing(self, t: int) -> bool:
        """Whether a peer that is lost is still in the graph: not all need to have its last sum."""
        return self._outside is not None and self._outside in self.membership.members(t + 1)

    def _from_outside(self, peer: int, t: int, entry: _Round) -> Iterator[Share]:
        """Yield what a peer has of the peer that is lost for good by what it did in round t."""
        sent, gave = self._last_words.get((peer, t), (None, None))
        if (t, self._outside) in entry.applied:
            assert sent is not None
            yield self._of_kind(sent)
        if self._push_sum and self._outside in entry.took:
            assert gave is not None
            yield gave
        for (each, round_, is_share), effective in self._returned.items():
            if self._push_sum and each == peer and effective == t:
                what = self._rounds[peer][round_]
                yield (what.gave if is_share else what.sent)[self._lost]

    def _to_outside(self, peer: int, t: int, entry: _Round) -> Iterator[Share]:
        """Yield what a peer gave to the peer that is lost for good in round t."""
        # Without push-sum a peer puts back its own share where the other end's does not come.
        if self._lost in entry.sent and (self._push_sum or (t, self._lost) in entry.applied):
            yield self._of_kind(entry.sent[self._lost])
        if self._push_sum and self._lost in entry.gave:
            yield entry.gave[self._lost]

    def _unsponsored(self, peer: int, t: int, entry: _Round) -> Iterator[Share]:
        """Yield what a peer begins with whose sponsor was lost before it gave it anything."""
        was, is_now = (peer in self.membership.members(round_) for round_ in (t, t + 1))
        if is_now and not was and not entry.took:
            yield UNSPONSORED_WEIGHT * self.scenario.x0.astype(np.float64), UNSPONSORED_WEIGHT

    @property
    def _lost(self) -> int:
        assert self._outside is not None
        return self._outside

    def _of_kind(self, sent: Share) -> Share:
        """Without push-sum u is 1, whatever is sent."""
        return sent if self._push_sum else (sent[0], 0.0)

    def _change_of_mean(self, peer: int, t: int, entry: _Round) -> Iterator[Share]:
        """Yield what a peer without push-sum adds to the sums as it joins after round t, or leaves then."""
        was, is_now = (peer in self.membership.members(round_) for round_ in (t, t + 1))
        assert entry.state is not None
        if is_now and not was:
            for giver in entry.took:
                gave = self._last_words[peer, t][1] if giver == self._outside else self._rounds[giver][t].gave[peer]
                assert gave is not None
                yield gave[0], 1.0
        elif was and not is_now:
            yield -entry.state.x, -entry.state.u


def _add(sums: list[Vector], parts: Iterable[Share], scale: float = 1.0) -> None:
    """Add (x, u) of each part to the two sums."""
    for x, u in parts:
        sums[0] = sums[0] + scale * x
        sums[1] = sums[1] + scale * u
