"""What must hold whatever happens: mass, agreement of replicas, every message once, the bits of the undisturbed run.

The auditor sees everything, which no peer does: states after rounds, frames as they were put on a stream, and whose
messages were applied in which round. Crashes undo rounds; what a peer does again replaces what is known of it, and has
to be the same wherever the first time could have been seen by others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from peer import wire
from peer.compress import Dense, add_decompressed_
from peer.gossip.mixing import local_step_rate
from peer.participant import Participant
from peer.simulate.faults.scenario import RoundState, Scenario, state_of
from peer.wire.message import Message

_U_TOLERANCE = 1e-9
_X_TOLERANCE = 2e-4
"""Float32 rounding of a hundred rounds stays a hundred times below this; a lost message is a hundred times above."""


class InvariantBroken(AssertionError):
    """Something happened that must never happen; the text says what."""


@dataclass
class _Round:
    """What one peer did in one round."""

    moved: npt.NDArray[np.float64] | float = 0.0
    """What its local step added to x."""
    sent: dict[int, tuple[npt.NDArray[np.float64] | float, float]] = field(default_factory=dict)
    """Receiver → (x, u) that the message is to bring it."""
    applied: list[tuple[int, int]] = field(default_factory=list)
    """(round, sender) of messages whose effect is in the state after it."""
    state: RoundState | None = None


@dataclass(frozen=True)
class _Balance:
    """What must be the case between two rounds."""

    expected: npt.NDArray[np.float64]
    """What Σx is to be, with what is in flight."""
    flying_x: npt.NDArray[np.float64] | float
    flying_u: float


class Auditor:
    """Watches one simulated run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.checked_rounds = 0
        self._undisturbed = None if scenario.case.late else scenario.undisturbed()
        self._rounds: list[list[_Round]] = [[] for _ in range(scenario.num_peers)]
        self._open: list[_Round] = [_Round() for _ in range(scenario.num_peers)]
        self._frames: dict[tuple[int, int, int], bytes] = {}
        """(sender, receiver, number) → digest of the frame that has this number."""
        self._own_replicas: dict[tuple[int, int], bytes] = {}
        """(peer, differences that it holds) → digest of the peer's own replica."""
        self._applied: list[set[tuple[int, int]]] = [set() for _ in range(scenario.num_peers)]
        """(round, sender) of every message that is in a peer's state."""
        self._balances = [_Balance(scenario.num_peers * scenario.x0.astype(np.float64), 0.0, 0.0)]
        """What Σx has to be at the start and after every round that was checked, and what is in flight."""

    @property
    def completed(self) -> int:
        """How many rounds all peers have completed, by what is known now."""
        return min(len(rounds) for rounds in self._rounds)

    def began(self, peer: int) -> None:
        """A process of a peer starts, and will go back to some state."""
        self._open[peer] = _Round()

    def stepped(self, participant: Participant, round_: int, rate: float, gradient: npt.NDArray[np.float32]) -> None:
        """A local step is about to be applied."""
        self._undo(participant.peer, round_)
        algorithm = participant.algorithm
        step = local_step_rate(rate, algorithm.u, algorithm.node.push_weight_guard) if algorithm.spec.push_sum else rate
        self._open[participant.peer].moved = -step * gradient.astype(np.float64)

    def observed(self, participant: Participant, what: str, round_: int, other: int, frame: bytes) -> None:
        """A frame was made ("sent"), or is in the state from the end of the round under way on ("applied")."""
        if what == "applied":
            self._open[participant.peer].applied.append((round_, other))
            return
        self._undo(participant.peer, round_)
        if self.scenario.case.late:
            message = wire.decode(frame, self.scenario.layout)
            self._open[participant.peer].sent[other] = self._contribution(participant, message)

    def put_on_stream(self, sender: int, receiver: int, seq: int, frame: bytes) -> None:
        """A numbered frame is given to a stream: the first time, or again."""
        digest = hashlib.blake2b(frame, digest_size=16).digest()
        if self._frames.setdefault((sender, receiver, seq), digest) != digest:
            raise InvariantBroken(f"peer {sender} sent peer {receiver} two different frames under number {seq}")

    def round_done(self, participant: Participant) -> None:
        """A peer has completed a round."""
        peer, t = participant.peer, participant.round - 1
        self._undo(peer, t)
        entry, self._open[peer] = self._open[peer], _Round()
        entry.state = state = state_of(participant)
        if len(self._rounds[peer]) != t:
            raise InvariantBroken(f"peer {peer} completed round {t} after {len(self._rounds[peer]) - 1}")
        if self._undisturbed is not None and state.digest != self._undisturbed[peer][t].digest:
            raise InvariantBroken(f"peer {peer} is not what it would be undisturbed after round {t}")
        # A modulo message whose repair was needed is listed once for each part.
        for pair in set(entry.applied) if participant.algorithm.spec.modulo else entry.applied:
            if pair in self._applied[peer]:
                raise InvariantBroken(f"peer {peer} applied the message of peer {pair[1]}, round {pair[0]}, twice")
            self._applied[peer].add(pair)
        self._rounds[peer].append(entry)
        self._check_replicas(participant)
        while len(self._balances) <= self.completed:
            self._check_mass(len(self._balances) - 1)
            self.checked_rounds = max(self.checked_rounds, len(self._balances) - 1)

    def finish(self, participants: Sequence[Participant]) -> None:
        """All peers are done, have taken what came late, and owe nobody anything: nothing is in flight any more."""
        if self.completed != self.scenario.rounds:
            raise InvariantBroken(f"all peers ended after {self.completed} of {self.scenario.rounds} rounds")
        sum_u = sum(participant.algorithm.u for participant in participants)
        if abs(sum_u - self.scenario.num_peers) > _U_TOLERANCE:
            raise InvariantBroken(f"Σu is {sum_u} in the end, of {self.scenario.num_peers}")
        if self._undisturbed is not None:
            for participant in participants:
                if state_of(participant).digest != self._undisturbed[participant.peer][-1].digest:
                    raise InvariantBroken(f"peer {participant.peer} ends with other bits than undisturbed")

    def _undo(self, peer: int, round_: int) -> None:
        """Forget the rounds from `round_` on: the peer does them again."""
        rounds = self._rounds[peer]
        if len(rounds) <= round_:
            return
        for undone in rounds[round_:]:
            self._applied[peer].difference_update(undone.applied)
        del rounds[round_:], self._balances[round_ + 1 :]

    def _contribution(
        self, participant: Participant, message: Message
    ) -> tuple[npt.NDArray[np.float64] | float, float]:
        algorithm, layout = participant.algorithm, self.scenario.layout
        rate = getattr(algorithm, "averaging_rate", lambda t: algorithm.node.averaging_rate)(message.round)
        if hasattr(algorithm, "replicas"):
            value = algorithm.replicas.own.astype(np.float64)
        elif all(isinstance(layer, Dense) for layer in message.layers):
            value = np.concatenate([layer.values for layer in message.layers]).astype(np.float64)  # type: ignore[union-attr]
        else:
            value = np.zeros(layout.size)
            add_decompressed_(value, message.layers, layout)
        weight = rate * message.mixing_weight
        return weight * value, weight * message.push_weight

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

    def _check_mass(self, t: int) -> None:
        """Σx and Σu after round t of every peer, with what was sent by then and not applied by then."""
        scenario, before = self.scenario, self._balances[t]
        expected, flying_x, flying_u = before.expected, before.flying_x, before.flying_u
        sum_x, sum_u = np.zeros_like(expected), 0.0
        for peer, rounds in enumerate(self._rounds):
            entry = rounds[t]
            assert entry.state is not None
            sum_x += entry.state.x
            sum_u += entry.state.u
            expected = expected + entry.moved
            if scenario.case.late:
                for x, u in entry.sent.values():
                    flying_x, flying_u = flying_x + x, flying_u + u
                for round_, sender in entry.applied:
                    x, u = self._rounds[sender][round_].sent[peer]
                    flying_x, flying_u = flying_x - x, flying_u - u
        self._balances.append(_Balance(expected, flying_x, flying_u))
        if abs(sum_u + flying_u - scenario.num_peers) > _U_TOLERANCE:
            raise InvariantBroken(f"Σu is {sum_u} after round {t} and {flying_u} in flight, of {scenario.num_peers}")
        off = float(np.abs(sum_x + flying_x - expected).max())
        if off > _X_TOLERANCE * scenario.num_peers and scenario.conserves_sum:
            raise InvariantBroken(f"Σx is off by {off:.3g} after round {t}, with what is in flight")
