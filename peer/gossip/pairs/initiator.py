"""The exchanges that a peer asks for: one request at a time, until a reply, a refusal or the loss of its partner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peer.errors import LocalProtocolError, RemoteProtocolError
from peer.gossip.effects import Effects
from peer.gossip.pairs.events import Event
from peer.gossip.pairs.model import PairModel
from peer.gossip.pairs.open_exchanges import OpenRequest
from peer.random import Purpose, stream
from peer.wire.message import Message, MessageKind

BACKOFF_S = 0.01
"""The first pause after a busy answer, in seconds; it doubles up to 64-fold, times ½ to 1½ at random."""


class Initiator:
    """The asking side of one peer."""

    def __init__(self, model: PairModel) -> None:
        self.open: OpenRequest | None = None
        self.next_exchange = 0
        """The number of the next own request; every number below is used up."""
        self.refusals = 0
        """Refusals in a row."""
        self._model, self._node = model, model.node

    def choose_partner(self, candidates: Sequence[int]) -> int:
        """Return one of the candidates, drawn uniformly by seed, peer and exchange number."""
        node = self._node
        draws = stream(node.seed, node.peer, Purpose.PAIRING, self.next_exchange)
        return candidates[int(draws.integers(1, len(candidates))[0])]

    def request(self, partner: int, exchange: int | None, answered: int) -> Message:
        """Open an exchange and return the request. `exchange` is its number, the next one unless given; `answered` that
        of the partner's exchange which this peer answered last, -1 for none."""
        number = self.next_exchange if exchange is None else exchange
        if number < self.next_exchange:
            raise LocalProtocolError(f"exchange {number} comes after {self.next_exchange - 1}")
        self.next_exchange = number + 1
        x = self._model.x
        message = Message(
            MessageKind.PAIR_REQUEST,
            self._node.peer,
            number,
            phase=answered + 1,
            mixing_weight=0.5,
            layers=self._model.coding.code_request(x, number),
        )
        self.open = OpenRequest(partner, message, x.copy())
        return message

    def note_step(self) -> None:
        """Note that the next event is a step."""
        if self.open is not None and self.open.first_step is None:
            self.open.first_step = len(self._model.events)

    def take_events(self) -> list[Event]:
        """Return the events whose serial place is final and forget them."""
        events = self._model.events
        final = len(events)
        if self.open is not None and self.open.first_step is not None:
            # The mix of the open exchange is inserted before that step, if it comes about.
            final, self.open.first_step = self.open.first_step, 0
        taken, self._model.events = events[:final], events[final:]
        return taken

    def take_reply(self, reply: Message) -> Effects:
        """Mix with the reply, with which the partner has mixed already."""
        request, model = self.open, self._model
        if request is None or not request.is_subject_of(reply):
            return Effects()  # A repeated one.
        if model.read_theirs(reply, request.sent, {}):
            raise RemoteProtocolError("chose a θ below the distance that it measured", peer=reply.sender)
        self.open, self.refusals = None, 0
        model.mix(reply, request.message.layers, request.sent, frozenset(request.violated))
        at = len(model.events) if request.first_step is None else request.first_step
        model.events.insert(at, ("mix", self._node.peer, reply.sender, reply.round))
        return Effects(mixed_with=reply.sender)

    def take_refusal(self, busy: Message) -> Effects:
        """Give the exchange up and say when to try another one."""
        request, node = self.open, self._node
        if request is None or not request.is_subject_of(busy):
            return Effects()
        self.open = None
        draw = stream(node.seed, node.peer, Purpose.BACKOFF, busy.round).uniforms(1, np.float64)
        pause_s = BACKOFF_S * 2 ** min(self.refusals, 6) * (0.5 + float(draw[0]))
        self.refusals += 1
        return Effects(retry_after_s=pause_s)

    def repair(self, wanted: Message) -> Message:
        """Return the further bits of the request that its partner asks for. May be repeated."""
        request, asker = self.open, wanted.sender
        if request is None or not request.is_subject_of(wanted):
            raise RemoteProtocolError(f"asks to repair exchange {wanted.round}, which is over", peer=asker)
        coding = self._model.coding
        layers = tuple(coding.repair_layer(wish, request.message, request.sent, asker) for wish in wanted.wanted)
        ids = tuple(wish.layer for wish in wanted.wanted)
        request.violated |= set(ids)
        return Message(
            MessageKind.REPAIR, self._node.peer, wanted.round, phase=wanted.phase, layers=layers, layer_ids=ids
        )

    def lost(self, peer: int) -> None:
        """Forget the request to a peer that is lost for good."""
        if self.open is not None and self.open.partner == peer:
            self.open = None
