"""The exchanges that others ask a peer for: its answers, refusals and requests for repairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.gossip.effects import Effects, Send
from peer.gossip.pairs.model import PairModel
from peer.gossip.pairs.open_exchanges import OpenRequest, OpenResponse, message_from_array, message_to_array
from peer.wire.message import Message, MessageKind


class Responder:
    """The answering side of one peer. Every exchange number of a neighbour has one result for ever."""

    def __init__(self, model: PairModel) -> None:
        self.open: OpenResponse | None = None
        self.repairs = 0
        """Layers of requests that had to be repaired so far."""
        self._replies: dict[int, Message] = {}
        """The last reply to each neighbour. This side has mixed; if the reply is lost, only the same reply makes the
        other half of that mix. One is enough, since a neighbour makes its next request after it took the reply or gave
        the exchange up."""
        self._refused: dict[int, int] = {}
        """The last exchange of each neighbour that was refused. Its initiator takes the refusal as final, so to answer
        a copy of the request that is still on its way would mix one side only."""
        self._model, self._peer = model, model.node.peer

    def last_answered(self, partner: int) -> int:
        """Return the number of the neighbour's exchange that was answered last, -1 for none."""
        reply = self._replies.get(partner)
        return -1 if reply is None else reply.round

    def take_request(self, request: Message, own: OpenRequest | None) -> Effects:
        """Answer a request, refuse it, or ask for a repair. `own`: this peer's own request without an answer."""
        sender, number = request.sender, request.round
        answered, refused = self.last_answered(sender), self._refused.get(sender, -1)
        if number == answered:
            return Effects(sends=[Send(sender, self._replies[sender])])
        if number <= max(refused, answered):
            # If it is an older one, its initiator has gone on since and ignores this, unless it went back to an old
            # state in a crash.
            return self._busy(request)
        if self.open is not None:
            waiting = self.open
            if (waiting.request.sender, waiting.request.round) == (sender, number):
                return Effects(sends=[Send(sender, waiting.repair_request(self._peer))])
            return self._refuse(request)
        if own is not None and not self._gives_way(own, request):
            return self._refuse(request)
        return self._respond(OpenResponse(request))

    def _gives_way(self, own: OpenRequest, request: Message) -> bool:
        """Return whether to answer a request although the own one is open: the two cross, and the other peer is lower.

        Two requests cross if neither peer had the other's when it sent its own. Refusing both would let them collide
        again and again; answering both would mix twice, in one order here and in the other there. One is answered,
        therefore: the lower peer's, by convention. The own request stays open until the lower peer answers it.

        They do not cross if the lower peer has answered ours already and the answer was lost or is still on its way:
        its request comes after that exchange, which must be completed here first. A request says by its phase which
        exchange its sender answered last.
        """
        crosses = own.partner == request.sender and request.phase != own.message.round + 1
        return crosses and request.sender < self._peer

    def _refuse(self, request: Message) -> Effects:
        self._refused[request.sender] = request.round
        return self._busy(request)

    def _busy(self, request: Message) -> Effects:
        return Effects(sends=[Send(request.sender, Message(MessageKind.PAIR_BUSY, self._peer, request.round))])

    def _respond(self, response: OpenResponse) -> Effects:
        """Mix and reply in one moment, or ask for missing bits."""
        request, model = response.request, self._model
        sender, number = request.sender, request.round
        wishes = model.read_theirs(request, model.x, response.further)
        if wishes:
            if response.phase == 0:
                self.repairs += len(wishes)
            response.phase += 1
            response.wishes = wishes
            self.open = response
            return Effects(sends=[Send(sender, response.repair_request(self._peer))])
        self.open = None
        payload = model.coding.code_reply(model.x, request)
        reply = Message(MessageKind.PAIR_REPLY, self._peer, number, mixing_weight=0.5, layers=payload)
        model.mix(request, payload, model.x, frozenset(response.further))
        self._replies[sender] = reply
        model.events.append(("mix", sender, self._peer, number))
        return Effects(sends=[Send(sender, reply)], mixed_with=sender)

    def take_repair(self, repair: Message) -> Effects:
        """Try again to answer, with further bits."""
        response = self.waiting_for(repair)
        if response is None:
            return Effects()  # A repeated one.
        response.take(repair)
        return self._respond(response)

    def waiting_for(self, repair: Message) -> OpenResponse | None:
        """Return the response that waits for this repair, if one does."""
        return self.open if self.open is not None and self.open.awaits(repair) else None

    def disconnected(self, peer: int) -> None:
        """Forget a repair under way with a peer whose connection broke: it repeats its request, or has forgotten it."""
        if self.open is not None and self.open.request.sender == peer:
            self.open = None

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return the state that must survive a crash, as named arrays."""
        layout = self._model.node.layout
        state: dict[str, npt.NDArray[Any]] = {
            "refused": np.array(sorted(self._refused.items()), np.int64).reshape(-1, 2)
        }
        for partner, reply in self._replies.items():
            state[f"reply.{partner}"] = message_to_array(reply, layout)
        return state if self.open is None else state | self.open.state(self._peer, layout)

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a result of `state`."""
        layout, dtype = self._model.node.layout, self._model.x.dtype
        self._refused = {int(partner): int(number) for partner, number in state["refused"]}
        self._replies = {
            int(name.removeprefix("reply.")): message_from_array(frame, layout, dtype)
            for name, frame in state.items()
            if name.startswith("reply.")
        }
        self.open = OpenResponse.from_state(state, layout, dtype)
