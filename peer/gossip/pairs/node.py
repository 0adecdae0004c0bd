"""One peer of a pairwise algorithm, as its driver sees it. The package docstring says how a pair stays atomic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from peer.compress.payload import FloatArray
from peer.errors import LocalProtocolError, RemoteProtocolError
from peer.gossip.base import AlgorithmSpec, Metrics, NodeContext
from peer.gossip.effects import Effects, Send
from peer.gossip.mixing import restored_like
from peer.gossip.pairs.coding import PairCoding
from peer.gossip.pairs.events import Event, events_from_array, events_to_array
from peer.gossip.pairs.initiator import Initiator
from peer.gossip.pairs.judge import judge
from peer.gossip.pairs.model import PairModel, Staleness
from peer.gossip.pairs.open_exchanges import OpenRequest
from peer.gossip.pairs.responder import Responder
from peer.gossip.plausibility import HALF, OWN_MODEL
from peer.wire.message import Message, MessageKind


class PairNode:
    """One peer of a pairwise algorithm; a subclass gives the algorithm and its coding of models."""

    spec: ClassVar[AlgorithmSpec]
    coding_type: ClassVar[type[PairCoding]]
    u: ClassVar[float] = 1.0

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        """Start from `x0: float32[n]` or `float64[n]`, which is copied."""
        self.node = node
        self.neighbors = tuple(sorted({*node.schedule.all_senders(node.peer), *node.schedule.all_receivers(node.peer)}))
        self._model = PairModel(node, x0, self.coding_type(node, x0))
        self.reaches = self._model.reaches
        self._initiator, self._responder = Initiator(self._model), Responder(self._model)

    # Training.

    @property
    def x(self) -> FloatArray:
        """The model: float32[n] or float64[n]."""
        return self._model.x

    def model(self) -> FloatArray:
        """Return x to evaluate and export. The caller must not write to it."""
        return self.x

    @property
    def can_read(self) -> bool:
        """Whether `read` is allowed: not after a step while the own request is open."""
        return self._initiator.open is None or self._initiator.open.first_step is None

    def read(self) -> FloatArray:
        """Return a copy of x to compute a gradient at."""
        if not self.can_read:
            raise LocalProtocolError("reads after a step while its exchange is open; wait for the reply")
        return self._model.read()

    def step(self, gradient: FloatArray, rate: float) -> None:
        """x ← x − γ g, g computed at the last result of `read`."""
        self._initiator.note_step()
        if self.staleness.steps % 10 == 0:
            # Each costs a pass over the model. Of a peer that is alone for long nobody has heard how it grew.
            limit = self.reaches.allowed(OWN_MODEL, share=HALF)
            self.reaches.note_own(self.staleness.steps, min(self._model.norm(), limit))
        number = gradient.dtype.type
        share = self.reaches.share_within(self.staleness.steps, self.x, lambda: gradient * number(-rate))
        self._model.step(gradient if share == 1.0 else gradient * number(share), rate)

    @property
    def staleness(self) -> Staleness:
        """Age of the gradients applied. The caller must not write to it."""
        return self._model.staleness

    def metrics(self) -> Metrics:
        """Return the health figures since the last exchange."""
        coding = self._model.coding
        return Metrics(neighbor_distance=coding.distance, repairs=self._responder.repairs, theta=coding.largest_theta)

    def take_events(self) -> list[Event]:
        """Return the events whose serial place is final and forget them."""
        return self._initiator.take_events()

    # Exchanges.

    @property
    def idle(self) -> bool:
        """Whether this peer may initiate an exchange."""
        return self._initiator.open is None and self._responder.open is None

    def skip_exchanges(self, count: int) -> None:
        """Leave out `count` exchange numbers: after restoring a state that may be older than the last request, so that
        no number stands for two exchanges."""
        self._initiator.next_exchange += count

    def choose_partner(self, among: Sequence[int] | None = None) -> int:
        """Return a neighbour for the next request, drawn uniformly by seed, peer and exchange number. `among`: the
        candidates, not empty; all neighbours unless given."""
        return self._initiator.choose_partner(self.neighbors if among is None else among)

    def request(self, partner: int, exchange: int | None = None) -> Message:
        """Open an exchange and return the request for `partner`. `exchange` is its number, ascending; the next one
        unless given."""
        if not self.idle:
            raise LocalProtocolError("a peer is in one exchange at a time")
        if partner not in self.neighbors:
            raise LocalProtocolError(f"peer {partner} is no neighbour")
        return self._initiator.request(partner, exchange, self._responder.last_answered(partner))

    @property
    def open_request(self) -> tuple[int, Message] | None:
        """The request without an answer, to be sent again after a reconnect or restart."""
        request = self._initiator.open
        return None if request is None else (request.partner, request.message)

    def lost(self, peer: int) -> None:
        """Forget open exchanges with a peer that is declared lost for good."""
        self._initiator.lost(peer)
        self._responder.disconnected(peer)

    def disconnected(self, peer: int) -> None:
        """Forget a repair under way with a peer whose connection broke."""
        self._responder.disconnected(peer)

    def receive(self, message: Message) -> Effects:
        """Judge and take one message. Raises RemoteProtocolError if an honest peer would not have sent it."""
        self.judge(message)
        return self.take(message)

    def judge(self, message: Message) -> float:
        """Return how far a message moves the model. Raises RemoteProtocolError if an honest peer would not have sent
        it; nothing changes."""
        return judge(message, self.neighbors, self._model, self._responder)

    def check_own(self, message: Message, partner: int) -> None:
        """Raise DivergenceError rather than send what a partner might refuse for how far it moves a model."""
        reach = max(self._model.coding.reach(message), self._model.norm()) if message.layers else 0.0
        self.reaches.check_own(self.staleness.steps, reach, self._model.norm, (partner,))

    def take(self, message: Message) -> Effects:
        """Take one message that was judged. Raises RemoteProtocolError, before anything changes, if only reading it
        shows that an honest peer would not have sent it."""
        match message.kind:
            case MessageKind.PAIR_REQUEST:
                return self._responder.take_request(message, self._initiator.open)
            case MessageKind.PAIR_REPLY:
                return self._initiator.take_reply(message)
            case MessageKind.PAIR_BUSY:
                return self._initiator.take_refusal(message)
            case MessageKind.REPAIR_REQUEST:
                return Effects(sends=[Send(message.sender, self._initiator.repair(message))])
            case MessageKind.REPAIR:
                return self._responder.take_repair(message)
        raise RemoteProtocolError(f"sent {message.kind.name} in an asynchronous run", peer=message.sender)

    # State.

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return everything that must survive a crash at any moment, as named arrays. To be taken before the messages
        of an outcome leave."""
        model, initiator, responder = self._model, self._initiator, self._responder
        counters = [initiator.next_exchange, initiator.refusals, responder.repairs, *astuple(model.staleness)]
        return {
            "x": model.x,
            "u": np.array([1.0]),
            "counters": np.array(counters, np.int64),
            "events": events_to_array(model.events),
            **responder.state(),
            **({} if initiator.open is None else initiator.open.state(self.node.layout)),
            **model.coding.state(),
            **model.reaches.state(),
        }

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a result of `state`. Raises KeyError or ValueError if it does not fit."""
        model, initiator, responder = self._model, self._initiator, self._responder
        model.x = restored_like(model.x, state["x"])
        initiator.next_exchange, initiator.refusals, responder.repairs, *counts = map(int, state["counters"])
        model.staleness = Staleness(*counts)
        model.events = events_from_array(state["events"])
        responder.restore(state)
        initiator.open = OpenRequest.from_state(state, self.node.layout, model.x)
        model.coding.restore(state)
        model.reaches.restore(state, model.norm)
