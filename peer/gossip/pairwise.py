"""AD-PSGD and its Moniqua form: no rounds, pairs of peers that average when it suits them.

    read:  z ← x, and the gradient is computed at z
    mix:   x_i, x_j ← (x_i + x_j)/2, atomically for the pair
    step:  x ← x − γ g(z)

A `PairNode` is one peer's side, without sockets or clock. How a pair stays atomic without locks:

- A peer is in one exchange at a time, as initiator or responder. The responder averages in the moment in which it
  answers. A busy peer says so at once, and the initiator tries again later, with another neighbour if there is one. No
  peer waits while it holds something that another one waits for, so that no graph can deadlock.
- Both add ½ (x̂_other − x̂_own **as sent**), so that a gradient step between request and reply commutes with the mix.
  Only a read after such a step has to wait (`can_read`): the model that it saw would fit no serial order.
- When two requests cross, the lower peer's wins: the higher peer answers it, while the lower peer, which is waiting
  itself, refuses the other.
- Every exchange number has one result for ever. A repeated request (after a disconnect or a crash) gets the same reply,
  applied once. What was refused stays refused, and the initiator tries again under a new number.

`events` is the serial log of one peer in the form of scenario files; `merge_events` makes one log of all of them, and
replaying that log gives the same models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from peer import random, wire
from peer.compress import compress_layers, decompress_layers
from peer.compress.modulo import theta_floor
from peer.compress.norms import max_magnitude
from peer.compress.payload import Dense, FloatArray, MoreBits, Payload, Residues, WholeIntegers
from peer.errors import LocalProtocolError, RemoteProtocolError
from peer.gossip.base import AlgorithmSpec, GraphNeed, Metrics, NodeContext
from peer.gossip.effects import Effects, Send
from peer.gossip.mixing import add_scaled_, check_layers, restored_like, whole_layer
from peer.gossip.moniqua import (
    check_codes,
    check_repair,
    code_error,
    distances,
    modulo_compressor,
    recover_or_wish,
    repair_of,
    theta_control,
)
from peer.gossip.theta import pairwise_mixing_time, refuse_unstable, theorem_5
from peer.gossip.value_bounds import excess
from peer.random import Purpose
from peer.wire.message import Message, MessageKind, RepairWish

Event: TypeAlias = tuple[Any, ...]
"""("read", i), ("mix", initiator, responder, exchange), ("step", i, γ)."""

MOST_EXCHANGES = 1 << 48
"""No peer makes more: each restart leaves out 2^16 numbers."""

BACKOFF_S = 0.01
"""The first pause after a busy answer, in seconds; it doubles up to 64-fold, times ½ to 1½ at random."""


@dataclass
class Staleness:
    """How old gradients were when they were applied."""

    steps: int = 0
    """Gradient steps taken."""
    exchanges: int = 0
    """Exchanges completed."""
    exchanges_between: int = 0
    """Exchanges between read and step, summed over the steps."""
    most_exchanges_between: int = 0
    steps_between: int = 0
    """Own steps between read and step, summed (0 unless the driver pipelines)."""


@dataclass
class _Initiated:
    """An own request without an answer yet."""

    partner: int
    exchange: int
    request: Message
    sent: FloatArray
    """x as sent."""
    first_step: int | None = None
    """Position in the log of the first step since the request: the mix belongs before it."""
    violated: set[int] = field(default_factory=set)
    """Layers of which the partner asked for more."""


@dataclass
class _Responding:
    """A request that cannot be read yet."""

    request: Message
    phase: int
    wishes: tuple[RepairWish, ...]
    further: dict[int, list[MoreBits | WholeIntegers]]


class PairNode(ABC):
    """One peer of a pairwise algorithm."""

    spec: ClassVar[AlgorithmSpec]
    u: ClassVar[float] = 1.0

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        """Start from `x0: float32[n]` or `float64[n]`, which is copied."""
        self.node = node
        self.x = np.array(x0, copy=True)
        self.neighbors = tuple(sorted({*node.schedule.all_senders(node.peer), *node.schedule.all_receivers(node.peer)}))
        self.staleness = Staleness()
        self.repairs = 0
        self._seed = node.seed
        self._next_exchange = 0
        self._refusals = 0
        self._initiated: _Initiated | None = None
        self._responding: _Responding | None = None
        self._replies: dict[int, Message] = {}
        """The last reply to each neighbour."""
        self._refused: dict[int, int] = {}
        """The last exchange of each neighbour that was refused."""
        self._at_read = (0, 0)
        self._events: list[Event] = []
        self._theirs, self._ours = np.empty_like(self.x), np.empty_like(self.x)
        self._distance: float | None = None

    # What the driver calls.

    def model(self) -> FloatArray:
        """Return x to evaluate and export. The caller must not write to it."""
        return self.x

    @property
    def idle(self) -> bool:
        """Whether this peer may initiate an exchange."""
        return self._initiated is None and self._responding is None

    @property
    def next_exchange(self) -> int:
        """The number of the next own request; every number below is used up."""
        return self._next_exchange

    @property
    def can_read(self) -> bool:
        """Whether `read` is allowed: not after a step while the own request is open."""
        return self._initiated is None or self._initiated.first_step is None

    def read(self) -> FloatArray:
        """Return a copy of x to compute a gradient at."""
        if not self.can_read:
            raise LocalProtocolError("reads after a step while its exchange is open; wait for the reply")
        self._at_read = (self.staleness.steps, self.staleness.exchanges)
        self._events.append(("read", self.node.peer))
        return self.x.copy()

    def step(self, gradient: FloatArray, rate: float) -> None:
        """x ← x − γ g, g computed at what `read` returned last."""
        add_scaled_(self.x, -rate, gradient)
        self._after_step(gradient, rate)
        steps, exchanges = self._at_read
        between = self.staleness.exchanges - exchanges
        self.staleness.exchanges_between += between
        self.staleness.most_exchanges_between = max(self.staleness.most_exchanges_between, between)
        self.staleness.steps_between += self.staleness.steps - steps
        self.staleness.steps += 1
        if self._initiated is not None and self._initiated.first_step is None:
            self._initiated.first_step = len(self._events)
        self._events.append(("step", self.node.peer, rate))

    def choose_partner(self, among: Sequence[int] | None = None) -> int:
        """Return a neighbour for the next request, drawn uniformly by seed, peer and exchange number. `among`: those
        who come into question, not empty; all unless given."""
        candidates = self.neighbors if among is None else among
        draw = random.integers(self._seed, self.node.peer, Purpose.PAIRING, self._next_exchange, 0, 1, len(candidates))
        return candidates[int(draw[0])]

    def skip_exchanges(self, count: int) -> None:
        """Leave out `count` exchange numbers: after restoring a state that may be older than the last request, so that
        no number stands for two exchanges."""
        self._next_exchange += count

    def request(self, partner: int, exchange: int | None = None) -> Message:
        """Open an exchange and return the request for `partner`. `exchange` is its number, ascending; the next one
        unless given."""
        if not self.idle:
            raise LocalProtocolError("a peer is in one exchange at a time")
        if partner not in self.neighbors:
            raise LocalProtocolError(f"peer {partner} is no neighbour")
        number = self._next_exchange if exchange is None else exchange
        if number < self._next_exchange:
            raise LocalProtocolError(f"exchange {number} comes after {self._next_exchange - 1}")
        self._next_exchange = number + 1
        payload = self._code_request(number)
        answered = self._replies.get(partner)
        message = Message(
            MessageKind.PAIR_REQUEST,
            self.node.peer,
            number,
            phase=0 if answered is None else answered.round + 1,
            mixing_weight=0.5,
            layers=payload,
        )
        self._initiated = _Initiated(partner, number, message, self.x.copy())
        return message

    @property
    def open_request(self) -> tuple[int, Message] | None:
        """The request without an answer, to be sent again after a reconnect or restart."""
        return None if self._initiated is None else (self._initiated.partner, self._initiated.request)

    def lost(self, peer: int) -> None:
        """Forget what is open with a peer that is declared lost for good."""
        if self._initiated is not None and self._initiated.partner == peer:
            self._initiated = None
        self.disconnected(peer)

    def disconnected(self, peer: int) -> None:
        """Forget a repair under way with a peer whose connection broke: it repeats its request, or has forgotten it."""
        if self._responding is not None and self._responding.request.sender == peer:
            self._responding = None

    def receive(self, message: Message) -> Effects:
        """Judge and take one message. Raises RemoteProtocolError if an honest peer would not have sent it."""
        self.judge(message)
        return self.take(message)

    def take(self, message: Message) -> Effects:
        """Take one message that was judged. Raises RemoteProtocolError, before anything changes, where only reading it
        shows that an honest peer would not have sent it."""
        if message.kind is MessageKind.PAIR_REQUEST:
            return self._on_request(message)
        if message.kind is MessageKind.PAIR_REPLY:
            return self._on_reply(message)
        if message.kind is MessageKind.PAIR_BUSY:
            return self._on_busy(message)
        if message.kind is MessageKind.REPAIR_REQUEST:
            return Effects(sends=[Send(message.sender, self._repair(message))])
        if message.kind is MessageKind.REPAIR:
            return self._on_repair(message)
        raise RemoteProtocolError(f"sent {message.kind.name} in an asynchronous run", peer=message.sender)

    def judge(self, message: Message) -> None:
        """Raise RemoteProtocolError if an honest peer would not have sent this message; nothing changes."""
        sender, kind = message.sender, message.kind
        if sender not in self.neighbors:
            raise RemoteProtocolError("is no neighbour in this graph", peer=sender)
        if kind in (MessageKind.GOSSIP, MessageKind.NOTHING):
            raise RemoteProtocolError(f"sent {kind.name} in an asynchronous run", peer=sender)
        if max(message.round, message.phase) > MOST_EXCHANGES:
            raise RemoteProtocolError(f"speaks of exchange {max(message.round, message.phase)}", peer=sender)
        gives = kind in (MessageKind.PAIR_REQUEST, MessageKind.PAIR_REPLY)
        if (message.mixing_weight, message.push_weight) != (0.5 if gives else 0.0, 1.0):
            raise RemoteProtocolError(
                f"told the weights {message.mixing_weight:g} and {message.push_weight:g} in an exchange of halves",
                peer=sender,
            )
        if gives:
            check_layers(message.layers, self.node.layout, sender, modulo=self.spec.modulo)
            self._check_codes(message)
            largest = excess(message, self.x.dtype, self.node)
            if largest is not None:
                raise RemoteProtocolError(f"has diverged: it sent numbers up to {largest:.3g}", peer=sender)
        elif kind is MessageKind.REPAIR and (responding := self._answered_by(message)) is not None:
            check_repair(message, responding.wishes, responding.request.layers, self.x.dtype)

    def take_events(self) -> list[Event]:
        """Return the events whose serial place is final and forget them."""
        final = len(self._events)
        if self._initiated is not None and self._initiated.first_step is not None:
            final = self._initiated.first_step
            self._initiated.first_step = 0
        taken, self._events = self._events[:final], self._events[final:]
        return taken

    # The responder.

    def _on_request(self, message: Message) -> Effects:
        sender, number = message.sender, message.round
        answered = self._replies.get(sender)
        if answered is not None and number == answered.round:
            return Effects(sends=[Send(sender, answered)])
        if number == self._refused.get(sender):
            return self._refuse(message)
        if number < max(self._refused.get(sender, -1), -1 if answered is None else answered.round):
            # Its initiator has gone on since and ignores this, unless it went back to an old state in a crash.
            return Effects(sends=[Send(sender, Message(MessageKind.PAIR_BUSY, self.node.peer, number))])
        if self._responding is not None:
            waiting = self._responding
            if (waiting.request.sender, waiting.request.round) == (sender, number):
                return Effects(sends=[Send(sender, self._repair_request(waiting))])
            return self._refuse(message)
        if self._initiated is not None and not self._gives_way(self._initiated, message):
            return self._refuse(message)
        return self._respond(_Responding(message, 0, (), {}))

    def _gives_way(self, initiated: _Initiated, message: Message) -> bool:
        """Return whether to answer a request although the own one is open: the two cross, and the other is lower.

        Not if it has answered ours already and the answer was lost: then the exchanges would happen in one order there
        and in the other one here. A request says by its phase which exchange its sender answered last.
        """
        crosses = initiated.partner == message.sender and message.phase != initiated.exchange + 1
        return crosses and message.sender < self.node.peer

    def _refuse(self, message: Message) -> Effects:
        self._refused[message.sender] = message.round
        return Effects(sends=[Send(message.sender, Message(MessageKind.PAIR_BUSY, self.node.peer, message.round))])

    def _respond(self, responding: _Responding) -> Effects:
        request = responding.request
        wishes = self._read_layers(request, self.x, responding.further)
        if wishes:
            if responding.phase == 0:
                self.repairs += len(wishes)
            responding.phase += 1
            responding.wishes = tuple(wishes)
            self._responding = responding
            return Effects(sends=[Send(request.sender, self._repair_request(responding))])
        self._responding = None
        number = request.round
        payload = self._code_reply(request)
        reply = Message(MessageKind.PAIR_REPLY, self.node.peer, number, mixing_weight=0.5, layers=payload)
        self._mix(request, payload, self.x, frozenset(responding.further))
        self._replies[request.sender] = reply
        self._events.append(("mix", request.sender, self.node.peer, number))
        return Effects(sends=[Send(request.sender, reply)], mixed_with=request.sender)

    def _repair_request(self, responding: _Responding) -> Message:
        return Message(
            MessageKind.REPAIR_REQUEST,
            self.node.peer,
            responding.request.round,
            phase=responding.phase,
            wanted=responding.wishes,
        )

    def _on_repair(self, message: Message) -> Effects:
        responding = self._answered_by(message)
        if responding is None:
            return Effects()  # A repeated one.
        for wish, layer in zip(responding.wishes, message.layers, strict=True):
            assert isinstance(layer, (MoreBits, WholeIntegers))
            responding.further.setdefault(wish.layer, []).append(layer)
        return self._respond(responding)

    def _answered_by(self, repair: Message) -> _Responding | None:
        """Return the request that waits for this repair, if one does."""
        responding = self._responding
        if responding is None:
            return None
        request = responding.request
        waits = (repair.sender, repair.round, repair.phase) == (request.sender, request.round, responding.phase)
        return responding if waits else None

    # The initiator.

    def _on_reply(self, message: Message) -> Effects:
        initiated = self._initiated
        if initiated is None or (message.sender, message.round) != (initiated.partner, initiated.exchange):
            return Effects()  # A repeated one.
        if self._read_layers(message, initiated.sent, {}):
            raise RemoteProtocolError("chose a θ below the distance that it measured", peer=message.sender)
        self._initiated, self._refusals = None, 0
        self._mix(message, initiated.request.layers, initiated.sent, frozenset(initiated.violated))
        at = len(self._events) if initiated.first_step is None else initiated.first_step
        self._events.insert(at, ("mix", self.node.peer, message.sender, message.round))
        return Effects(mixed_with=message.sender)

    def _on_busy(self, message: Message) -> Effects:
        initiated = self._initiated
        if initiated is None or (message.sender, message.round) != (initiated.partner, initiated.exchange):
            return Effects()
        self._initiated = None
        draw = random.uniforms(self._seed, self.node.peer, Purpose.BACKOFF, initiated.exchange, 0, 1, np.float64)
        pause_s = BACKOFF_S * 2 ** min(self._refusals, 6) * (0.5 + float(draw[0]))
        self._refusals += 1
        return Effects(retry_after_s=pause_s)

    def _repair(self, wanted: Message) -> Message:
        initiated = self._initiated
        if initiated is None or (wanted.sender, wanted.round) != (initiated.partner, initiated.exchange):
            raise RemoteProtocolError(f"asks to repair exchange {wanted.round}, which is over", peer=wanted.sender)
        layers = tuple(self._repair_layer(wish, initiated, wanted.sender) for wish in wanted.wanted)
        initiated.violated |= {wish.layer for wish in wanted.wanted}
        return Message(
            MessageKind.REPAIR,
            self.node.peer,
            wanted.round,
            phase=wanted.phase,
            layers=layers,
            layer_ids=tuple(wish.layer for wish in wanted.wanted),
        )

    # Both.

    def _mix(self, heard: Message, sent: Payload, reference: FloatArray, violated: frozenset[int]) -> None:
        """Add ½ (x̂_other − x̂_own as sent). The other's x̂ stands in `_theirs`; `reference` is what `sent` codes."""
        self._own_values(sent, reference, heard.round)
        self._after_mix(heard, reference, violated)
        # The difference first: where both are equal x does not move at all.
        np.subtract(self._theirs, self._ours, out=self._theirs)
        add_scaled_(self.x, 0.5, self._theirs)
        self.staleness.exchanges += 1

    @abstractmethod
    def _code_request(self, number: int) -> Payload:
        """Return the payload of x for the request of that exchange."""

    @abstractmethod
    def _code_reply(self, request: Message) -> Payload:
        """Return the payload of x for the reply; the requester's x̂ stands in `_theirs`."""

    def _check_codes(self, message: Message) -> None:  # noqa: B027 (whole models need no more than `check_layers`)
        """Raise RemoteProtocolError unless the payload can be read with this run's settings."""

    @abstractmethod
    def _read_layers(
        self, message: Message, reference: FloatArray, further: Mapping[int, list[MoreBits | WholeIntegers]]
    ) -> list[RepairWish]:
        """Write the sender's x̂ to `_theirs`; return what is wanted for layers that cannot be read yet."""

    @abstractmethod
    def _own_values(self, sent: Payload, reference: FloatArray, number: int) -> None:
        """Write to `_ours` what the other end reads from an own payload."""

    def _after_step(self, gradient: FloatArray, rate: float) -> None:  # noqa: B027 (nothing to note by default)
        """Take note of a gradient step."""

    @abstractmethod
    def _after_mix(self, heard: Message, reference: FloatArray, violated: frozenset[int]) -> None:
        """Take note of an exchange; `_theirs` and `_ours` hold both x̂."""

    @abstractmethod
    def _repair_layer(self, wish: RepairWish, initiated: _Initiated, asker: int) -> MoreBits | WholeIntegers:
        """Return further bits of one layer of the open request."""

    @abstractmethod
    def metrics(self) -> Metrics:
        """Return the health figures since the last exchange."""

    # State.

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return everything that must survive a crash at any moment, as named arrays.

        Taken before the messages of an outcome leave. A repair under way is not in it: the initiator repeats its
        request, and it starts again.
        """
        staleness = self.staleness
        counters = [
            self._next_exchange, self._refusals, self.repairs, *self._at_read, staleness.steps, staleness.exchanges,
            staleness.exchanges_between, staleness.most_exchanges_between, staleness.steps_between,
        ]  # fmt: skip
        state = {
            "x": self.x,
            "u": np.array([1.0]),
            "counters": np.array(counters, np.int64),
            "events": np.array([_row(event) for event in self._events], np.float64).reshape(-1, 4),
            "refused": np.array(sorted(self._refused.items()), np.int64).reshape(-1, 2),
        }
        for partner, reply in self._replies.items():
            state[f"reply.{partner}"] = self._frame(reply)
        if self._initiated is not None:
            state["request"] = self._frame(self._initiated.request)
            state["request.sent"] = self._initiated.sent
            first_step = -1 if self._initiated.first_step is None else self._initiated.first_step
            state["request.partner"] = np.array([self._initiated.partner, first_step], np.int64)
            state["request.violated"] = np.array(sorted(self._initiated.violated), np.int64)
        if self._responding is not None:
            state |= self._state_of_response(self._responding)
        return state

    def _state_of_response(self, responding: _Responding) -> dict[str, npt.NDArray[Any]]:
        request, further = responding.request, responding.further
        state = {
            "response.request": self._frame(request),
            "response.asked": self._frame(self._repair_request(responding)),
        }
        for depth in range(max(map(len, further.values()), default=0)):
            ids = tuple(sorted(layer for layer, answers in further.items() if len(answers) > depth))
            layers = tuple(further[layer][depth] for layer in ids)
            answer = Message(
                MessageKind.REPAIR, request.sender, request.round, phase=depth + 1, layers=layers, layer_ids=ids
            )
            state[f"response.further.{depth}"] = self._frame(answer)
        return state

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take back what `state` returned. Raises KeyError or ValueError if it does not fit."""
        self.x = restored_like(self.x, state["x"])
        counters = [int(value) for value in state["counters"]]
        self._next_exchange, self._refusals, self.repairs = counters[:3]
        self._at_read = (counters[3], counters[4])
        self.staleness = Staleness(*counters[5:])
        self._responding, self._initiated = None, None
        self._events = [_event(row) for row in state["events"]]
        self._refused = {int(partner): int(number) for partner, number in state["refused"]}
        self._replies = {
            int(name.removeprefix("reply.")): self._message(frame)
            for name, frame in state.items()
            if name.startswith("reply.")
        }
        if "request" in state:
            request, sent = self._message(state["request"]), restored_like(self.x, state["request.sent"])
            partner, first_step = (int(value) for value in state["request.partner"])
            self._initiated = _Initiated(
                partner,
                request.round,
                request,
                sent,
                None if first_step < 0 else first_step,
                {int(layer) for layer in state["request.violated"]},
            )
        if "response.request" in state:
            self._responding = self._response_of(state)

    def _response_of(self, state: Mapping[str, npt.NDArray[Any]]) -> _Responding:
        asked = self._message(state["response.asked"])
        further: dict[int, list[MoreBits | WholeIntegers]] = {}
        depth = 0
        while f"response.further.{depth}" in state:
            answer = self._message(state[f"response.further.{depth}"])
            for layer, values in zip(answer.layer_ids or (), answer.layers, strict=True):
                assert isinstance(values, (MoreBits, WholeIntegers))
                further.setdefault(layer, []).append(values)
            depth += 1
        return _Responding(self._message(state["response.request"]), asked.phase, asked.wanted, further)

    def _frame(self, message: Message) -> npt.NDArray[np.uint8]:
        return np.frombuffer(wire.encode(message, self.node.layout), np.uint8)

    def _message(self, frame: npt.NDArray[Any]) -> Message:
        return wire.decode(frame.tobytes(), self.node.layout, dtype=self.x.dtype)


class AdPsgd(PairNode):
    """x_i, x_j ← (x_i + x_j)/2, then x_i ← x_i − γ g, g computed at an earlier x_i, in full precision.

    Lian et al. 2017, Asynchronous Decentralized Parallel SGD, Algorithm 1. Invariant: Σ x moves by the gradient steps
    only, with what is in flight.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="ad-psgd",
        summary="No rounds: pairs of peers average while gradients are computed; no peer waits for slower ones.",
        source="Lian et al. 2017, AD-PSGD, Algorithm 1",
        graph=GraphNeed.SYMMETRIC,
        uses_averaging_rate=False,
        asynchronous=True,
    )

    def _code_request(self, number: int) -> Payload:
        draws = self.node.draw_source.draws(number)
        return compress_layers(self.node.compressor, self.x, self.node.layout, draws, whole_below=self.node.whole_below)

    def _code_reply(self, request: Message) -> Payload:
        return self._code_request(request.round)

    def _read_layers(
        self, message: Message, reference: FloatArray, further: Mapping[int, list[MoreBits | WholeIntegers]]
    ) -> list[RepairWish]:
        self._theirs = decompress_layers(message.layers, self.node.layout, self.x.dtype)
        return []

    def _own_values(self, sent: Payload, reference: FloatArray, number: int) -> None:
        self._ours = decompress_layers(sent, self.node.layout, self.x.dtype)

    def _after_mix(self, heard: Message, reference: FloatArray, violated: frozenset[int]) -> None:
        self._distance = distances(self._theirs, self._ours)[1] ** 0.5

    def _repair_layer(self, wish: RepairWish, initiated: _Initiated, asker: int) -> MoreBits | WholeIntegers:
        raise RemoteProtocolError("asks to repair what was sent in full", peer=asker)

    def metrics(self) -> Metrics:
        return Metrics(neighbor_distance=self._distance)


class MoniquaAdPsgd(PairNode):
    """x_i ← x_i + ½ (x̂_j − x̂_i), the pair exchanging modulo codes: AD-PSGD in a few bits a number.

    Lu and De Sa 2020, Moniqua, section 5 and Theorem 5. In verified mode only a request can need repair: the responder
    knows its distance to the initiator by then and chooses the θ of its reply accordingly.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="moniqua-ad-psgd",
        summary="AD-PSGD with a few bits per number.",
        source="Lu and De Sa 2020, Moniqua, section 5 and Theorem 5",
        graph=GraphNeed.SYMMETRIC,
        compresses=True,
        modulo=True,
        uses_averaging_rate=False,
        asynchronous=True,
    )

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        super().__init__(node, x0)
        self._compressor = modulo_compressor(node)
        self._theta = theta_control(node)
        if self._theta.mode == "verified":
            refuse_unstable(self._compressor, 0.5, halfway=True)
        self._rate = 0.0
        self._mixing_time = 1.0
        if self._theta.mode == "theorem":
            self._mixing_time = pairwise_mixing_time(node.schedule.matrix(0))
        self._largest_theta: float | None = None

    def _after_step(self, gradient: FloatArray, rate: float) -> None:
        self._rate = max(self._rate, rate)
        if self._theta.mode == "theorem":
            self._theta.see_gradient(max_magnitude(gradient))

    def _thetas(self, number: int) -> npt.NDArray[np.float64]:
        return self._theta.thetas(number, theorem_5(self._rate, 1.0, self._mixing_time), self._floors())

    def _floors(self) -> npt.NDArray[np.float64]:
        code = self._compressor
        return np.array(
            [
                theta_floor(max_magnitude(self.x[part]), code.bits, code.rounding, self.x.dtype)
                for part in self.node.layout.slices
            ]
        )

    def _code(self, number: int, thetas: npt.NDArray[np.float64]) -> Payload:
        draws = self.node.draw_source.draws(number)
        return tuple(
            whole_layer(self.x[part])
            if part.stop - part.start < self.node.whole_below
            else self._compressor.compress(self.x[part], layer, draws, theta=float(thetas[layer]))
            for layer, part in enumerate(self.node.layout.slices)
        )

    def _code_request(self, number: int) -> Payload:
        return self._code(number, self._thetas(number))

    def _code_reply(self, request: Message) -> Payload:
        if not self._compressor.verified:
            return self._code_request(request.round)
        # |x_j − x_i| ≤ |x_j − x̂_i| + δB, and some room for the rounding of these differences.
        epsilon = float(np.finfo(self.x.dtype).eps)
        bounds = [
            1.01
            * (
                distances(self._theirs[part], self.x[part])[0]
                + (code_error(sent) if isinstance(sent, Residues) else 0.0)
            )
            + 8.0 * epsilon * max_magnitude(self.x[part])
            for part, sent in zip(self.node.layout.slices, request.layers, strict=True)
        ]
        return self._code(request.round, np.maximum(self._floors(), bounds))

    def _check_codes(self, message: Message) -> None:
        check_codes(message, self._compressor, self._theta, self.x.dtype)

    def _read_layers(
        self, message: Message, reference: FloatArray, further: Mapping[int, list[MoreBits | WholeIntegers]]
    ) -> list[RepairWish]:
        draws, wishes = self.node.draw_source.draws(message.round), []
        for layer, (part, sent) in enumerate(zip(self.node.layout.slices, message.layers, strict=True)):
            if isinstance(sent, Residues):
                omega = self._compressor.omega(reference[part], layer, draws)
                more = further.get(layer, [])
                out, verified = self._theirs[part], self._compressor.verified
                wish = recover_or_wish(sent, more, layer, reference[part], omega, out, verified, message.sender)
                if wish is not None:
                    wishes.append(wish)
            else:
                assert isinstance(sent, Dense)
                self._theirs[part] = sent.values
        return wishes

    def _own_values(self, sent: Payload, reference: FloatArray, number: int) -> None:
        draws = self.node.draw_source.draws(number)
        for layer, (part, payload) in enumerate(zip(self.node.layout.slices, sent, strict=True)):
            if isinstance(payload, Residues):
                omega = self._compressor.omega(reference[part], layer, draws)
                self._compressor.code.own_value(reference[part], payload.theta, omega, out=self._ours[part])
            else:
                self._ours[part] = reference[part]

    def _after_mix(self, heard: Message, reference: FloatArray, violated: frozenset[int]) -> None:
        num_layers = self.node.layout.num_layers
        measured, thetas = np.zeros(num_layers), np.zeros(num_layers)
        squares = 0.0
        for layer, (part, sent) in enumerate(zip(self.node.layout.slices, heard.layers, strict=True)):
            largest, layer_squares = distances(self._theirs[part], reference[part])
            squares += layer_squares
            if isinstance(sent, Residues):
                measured[layer], thetas[layer] = largest - code_error(sent), sent.theta
        self._distance = squares**0.5
        used = self._thetas(heard.round)
        self._largest_theta = float(used.max())
        too_small = np.zeros(num_layers)
        for layer in violated:
            too_small[layer] = max(thetas[layer], used[layer])
        self._theta.after_round(heard.round, used, measured, thetas, too_small)

    def _repair_layer(self, wish: RepairWish, initiated: _Initiated, asker: int) -> MoreBits | WholeIntegers:
        sent = initiated.request.layers[wish.layer] if 0 <= wish.layer < self.node.layout.num_layers else None
        if not isinstance(sent, Residues):
            raise RemoteProtocolError(f"asks to repair layer {wish.layer}, which was not coded", peer=asker)
        values = initiated.sent[self.node.layout.slices[wish.layer]]
        omega = self._compressor.omega(values, wish.layer, self.node.draw_source.draws(initiated.exchange))
        return repair_of(self._compressor, values, sent.theta, omega, wish, asker)

    def metrics(self) -> Metrics:
        return Metrics(neighbor_distance=self._distance, repairs=self.repairs, theta=self._largest_theta)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return {**super().state(), **self._theta.state(), "rate": np.array([self._rate])}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        super().restore(state)
        self._theta.restore(state)
        self._rate = float(state["rate"][0])


_KINDS = ("read", "step", "mix")


def _row(event: Event) -> tuple[float, ...]:
    """Return an event as four numbers."""
    numbers = (float(_KINDS.index(event[0])), *map(float, event[1:]))
    return numbers + (0.0,) * (4 - len(numbers))


def _event(row: npt.NDArray[np.float64]) -> Event:
    """Return the event of four numbers."""
    kind = _KINDS[int(row[0])]
    if kind == "read":
        return (kind, int(row[1]))
    if kind == "step":
        return (kind, int(row[1]), float(row[2]))
    return (kind, int(row[1]), int(row[2]), int(row[3]))


def merge_events(logs: Sequence[Sequence[Event]]) -> list[Event]:
    """Return one serial log made of the logs of all peers (position: peer).

    A mix stands in the logs of both ends and happens once, when it is next in both. That always goes on: a peer is in
    one exchange at a time, and what it logs between request and reply touches nobody else. Raises ValueError if the
    logs do not belong together.
    """
    positions = [0] * len(logs)
    merged: list[Event] = []
    waiting = list(range(len(logs)))[::-1]
    while waiting:
        i = waiting.pop()
        while positions[i] < len(logs[i]):
            event = logs[i][positions[i]]
            if event[0] != "mix":
                merged.append(event)
                positions[i] += 1
                continue
            j = event[1] if event[2] == i else event[2]
            if positions[j] >= len(logs[j]) or logs[j][positions[j]] != event:
                break
            merged.append(event)
            positions[i] += 1
            positions[j] += 1
            waiting.append(j)
    if any(position < len(log) for position, log in zip(positions, logs, strict=True)):
        raise ValueError("the logs of these peers do not belong to one run")
    return merged
