"""Judgement of messages, by what an honest neighbour can have sent: the boundary of trust of a run in rounds.

`wire` has checked the form of a frame; its meaning is judged here, before anything of it is kept. The rules follow from
common knowledge: the round's graph and members, the algorithm's exchanges, the length of the run. Nothing changes here.
Afterwards the session and the algorithm can apply a message without fail.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NoReturn

import numpy as np

from peer.compress.base import Compressor
from peer.compress.payload import Dense, num_values
from peer.errors import RemoteProtocolError
from peer.gossip.base import Algorithm, AlgorithmSpec, Memory
from peer.gossip.boundary import COPY_PHASE, READ_PHASE, TRANSFER_PHASE, jumped, transfers
from peer.gossip.mixing import check_layers
from peer.gossip.moniqua import FURTHER_BITS
from peer.gossip.plausibility import Reaches, norm_of
from peer.gossip.session import Session
from peer.gossip.value_bounds import excess
from peer.gossip.views import ViewSchedule
from peer.wire.message import Message, MessageKind

WEIGHT_TOLERANCE = 1e-12
"""Allowed distance of a mixing weight from W_ij, for other rounding."""
_WEIGHT_ROOM = 2.0**-10
"""Allowed excess of Σu over the number of first members: for rounding, and for a thousand newcomers whose sponsor was
lost (`boundary.UNSPONSORED_WEIGHT`)."""
BURST = 0.25
"""What came late adds W (x_j − x_i) for each of the rounds that two peers went on without each other: after k rounds
up to k W times the distance that they have come to, and the room is as many times this larger."""
STARVED = 2.0
"""… and this much larger where push-sum weights may become small."""
_GIVING = frozenset({MessageKind.GOSSIP, MessageKind.PART})
"""Kinds with numbers that count in a model."""
_HANDOVERS = frozenset({READ_PHASE, TRANSFER_PHASE, COPY_PHASE})


class Judge:
    """Judges the messages of one peer's neighbours. All methods raise RemoteProtocolError, which names the sender."""

    def __init__(
        self, session: Session, views: ViewSchedule | None, compressors: Sequence[Compressor] = (), skips: int = 0
    ) -> None:
        """`views`: the schedule of the algorithm where members may change. `compressors`: all that peers may use.
        `skips`: how many rounds they may go on without each other."""
        self._session, self._views = session, views
        self._algorithm, self._node = session.algorithm, session.algorithm.node
        self._spec, self._me = session.algorithm.spec, session.algorithm.node.peer
        self._asks_for_repairs = self._spec.modulo and self._node.modulo.verified
        # Σu, which no change of the members raises.
        self._most_push_weight = self._node.schedule.num_first + _WEIGHT_ROOM
        spread = spread_of(self._spec, compressors or (self._node.compressor,), self._node.layout.sizes)
        # With push-sum, what was missed is a mean of models, and no sum; but whoever hears little, or nobody any more,
        # goes far.
        if self._spec.push_sum:
            spread *= STARVED if skips or views is not None else 1.0
        else:
            spread *= 1.0 + BURST * skips
        one_model = self._spec.tells_all is not None
        size, largest_loss = self._node.layout.size, self._node.largest_loss
        self.reaches = Reaches(self._me, size, largest_loss, one_model=one_model, spread=spread)
        self._algorithm.reaches = self.reaches
        self.reaches.note_own(0, self.own_norm())
        self._least_push_weight = float(np.finfo(session.algorithm.x.dtype).tiny)

    def judge(self, message: Message) -> None:
        """Accept a message that an honest peer would send to this one now."""
        self.check_form(message)
        self._session.check(message)
        if message.kind is MessageKind.REPAIR_REQUEST:
            return  # Whether it can be answered is for the answer to say, which changes nothing.
        if message.kind is MessageKind.REPAIR:
            self._check_repair(message)
        elif self._session.is_early(message.round):
            _refuse(
                message,
                f"is in round {message.round}, more than {self._session.max_lead} ahead of our {self._session.round}",
            )
        elif message.phase in _HANDOVERS:
            self._check_handover(message)
        else:
            self._check_place(message)

    def check_form(self, message: Message) -> None:
        """Accept a message that an honest peer would send in some round, whoever the members are."""
        # A replica is identified by the number of differences that it holds.
        rounds = self._node.rounds + (message.kind is MessageKind.REPAIR)
        if self._node.rounds and message.round >= rounds:
            _refuse(message, f"sent a message of round {message.round} in a run of {self._node.rounds}")
        if not self._has_phase(message):
            _refuse(message, f"sent {message.kind.name} in phase {message.phase}, where {self._spec.name} has none")
        if message.kind in _GIVING:
            self._check_payload(message)
        elif message.kind is MessageKind.REPAIR:
            sizes = self._node.layout.sizes
            for number, layer in zip(message.layer_ids or (), message.layers, strict=True):
                if num_values(layer) != sizes[number]:
                    _refuse(message, f"sent {num_values(layer)} numbers for layer {number}, which has {sizes[number]}")
        gives_nothing = message.kind not in _GIVING or message.phase == COPY_PHASE
        if gives_nothing and (message.mixing_weight, message.push_weight) != (0.0, 1.0):
            self._refuse_weights(message)

    def check_reach(self, message: Message, rate: float) -> None:
        """Let by what can move the own model no further than honest messages do (`plausibility`), and take note of it.
        For what `judge` let by. `rate`: γ of the message's round."""
        reach = self.reach(message, rate, self._me)
        self.reaches.check(self._session.round, message, reach, self.own_norm)
        # The sum of a part has in it what all gave.
        self.reaches.note(self._session.round, message.sender, reach, is_sum=message.kind is MessageKind.PART)

    def reach(self, message: Message, rate: float, receiver: int) -> float:
        """Return how far a message can move the receiver's model; 0 for one that moves none."""
        replaces = message.kind is MessageKind.REPAIR and self._spec.memory is Memory.REPLICAS
        # A newcomer has no model of its own: it takes that of its sponsor as it is.
        if not (message.kind in _GIVING or replaces) or not message.layers or self._session.is_joining:
            return 0.0
        of = Algorithm if message.phase in _HANDOVERS else type(self._algorithm)
        reach = of.reach(self._algorithm, message, rate, receiver)
        if self._spec.push_sum and (replaces or message.phase == COPY_PHASE):
            reach /= self._most_push_weight  # Copies are of x, whose u is not told with them.
        return reach

    def own_norm(self) -> float:
        """Return ‖z‖₂."""
        return norm_of(self._algorithm.x) / self._algorithm.u

    def _has_phase(self, message: Message) -> bool:
        """Whether the algorithm, or a change of members, has such a message in that phase."""
        kind, phase = message.kind, message.phase
        changes = self._views is not None
        if kind is MessageKind.GOSSIP:
            copies = changes and self._spec.memory is Memory.REPLICAS
            is_handover = (changes and phase == TRANSFER_PHASE) or (copies and phase == COPY_PHASE)
            return is_handover or (kind is self._algorithm.message_kind and self._is_own_phase(message))
        if kind is MessageKind.PART:
            return kind is self._algorithm.message_kind and self._is_own_phase(message)
        if kind is MessageKind.NOTHING:
            return (self._spec.may_send_nothing and phase == 0) or (
                changes and self._asks_for_repairs and phase == READ_PHASE
            )
        if kind in (MessageKind.REPAIR, MessageKind.REPAIR_REQUEST):
            if self._asks_for_repairs:
                return 1 <= phase <= len(FURTHER_BITS)
            return self._spec.memory is Memory.REPLICAS and phase == 0
        return True  # Of another kind of run: the session says so.

    def _is_own_phase(self, message: Message) -> bool:
        """Whether the algorithm itself has a message from that sender in that phase."""
        return message.phase in self._algorithm.phases_from(message.sender)

    def _check_payload(self, message: Message) -> None:
        algorithm, node = self._algorithm, self._node
        if message.phase in _HANDOVERS:
            check_layers(message.layers, node.layout, message.sender)
            if not all(isinstance(layer, Dense) for layer in message.layers):
                _refuse(message, "handed over something else than a whole model")
        else:
            if message.kind is MessageKind.GOSSIP:
                check_layers(message.layers, node.layout, message.sender, modulo=self._spec.modulo)
            algorithm.check_codes(message)
        u = message.push_weight
        possible = self._least_push_weight <= u <= self._most_push_weight if self._spec.push_sum else u == 1.0
        if not possible:
            self._refuse_weights(message)
        largest = excess(message, algorithm.x.dtype, node, of_factors=self._spec.sends_factors)
        if largest is not None:
            _refuse(message, f"has diverged: it sent numbers up to {largest:.3g}")

    def _check_place(self, message: Message) -> None:
        """Check the one message that an algorithm has from a sender in a phase of a round."""
        t, sender = message.round, message.sender
        if not self._algorithm.hears(t, sender):
            _refuse(message, f"is no in-neighbour in this graph in round {t}")
        if not self._session.is_next(message):
            _refuse(message, f"sent a message of round {t} out of turn")
        if message.kind is MessageKind.NOTHING:
            return
        told, weights = message.mixing_weight, self._algorithm.weights_from(t, sender)
        is_weight = math.copysign(1.0, told) > 0.0 and told <= 1.0
        if not is_weight or all(abs(told - weight) > WEIGHT_TOLERANCE for weight in weights):
            self._refuse_weights(message)
        if message.kind is MessageKind.PART:
            self._algorithm.check_part(message)

    def _check_handover(self, message: Message) -> None:
        """Check a message between a round and the next one with other members."""
        t, sender, me, views = message.round, message.sender, self._me, self._views
        if views is None or not views.membership.changes_at(t + 1):
            _refuse(message, f"hands over in round {t}, after which no member changes")
        if not self._session.is_open(message):
            _refuse(message, f"hands over in round {t} once more")
        if message.phase == READ_PHASE:
            is_due = sender in views.receivers_from(t, me, with_absent=True)
        elif message.phase == TRANSFER_PHASE:
            is_due = any((each.giver, each.taker) == (sender, me) for each in transfers(views, t, self._spec))
            if message.mixing_weight != 1.0:
                self._refuse_weights(message)
        else:
            restarts = jumped(transfers(views, t, self._spec), self._spec)
            is_new = sender not in views.senders_from(t, me, with_absent=True)
            is_due = sender in views.senders_from(t + 1, me, with_absent=True) and (is_new or sender in restarts)
        if not is_due:
            _refuse(message, f"hands over to this peer in round {t}, and has nothing for it")

    def _check_repair(self, message: Message) -> None:
        """Check a repair that is waited for; another one is dropped, as the answer to a request that was repeated."""
        if self._asks_for_repairs:
            if self._session.awaits_repair(message):
                self._algorithm.check_repair(message)
            return
        if message.round > self._session.round + self._session.max_lead:
            _refuse(message, f"sent a replica of round {message.round}, far ahead of our {self._session.round}")
        self._algorithm.check_repair(message)

    def _refuse_weights(self, message: Message) -> NoReturn:
        _refuse(
            message,
            f"told the weights {message.mixing_weight:g} and {message.push_weight:g} in round {message.round}, which "
            "nobody can have there",
        )


def _refuse(message: Message, problem: str) -> NoReturn:
    raise RemoteProtocolError(problem, peer=message.sender)


def spread_of(spec: AlgorithmSpec, compressors: Iterable[Compressor], sizes: Iterable[int]) -> float:
    """Return how many times as long as what it stands for the payload of an honest message can be, for layers of these
    sizes. Where errors are gathered, √((2 − δ)/δ), and twice that, since peers keep to half of their room: a number is
    sent with all rounds that it waited for, which is k of them with probability δ (1 − δ)ᵏ⁻¹ if δ of all numbers are
    drawn. Elsewhere √(1 + ω), by the noise of unbiased codes, and twice that where it adds up in copies."""
    if not spec.compresses or spec.modulo:
        return 1.0
    largest = max(sizes)
    bounds = [compressor.error_bound(largest) for compressor in compressors]
    if spec.memory is Memory.ERRORS:
        least = min(bound.contraction or 1.0 for bound in bounds)
        return 2.0 * math.sqrt((2.0 - least) / least)
    noise = math.sqrt(1.0 + max(bound.variance or 0.0 for bound in bounds))
    return 2.0 * noise if spec.memory is Memory.REPLICAS and spec.needs_unbiased else noise
