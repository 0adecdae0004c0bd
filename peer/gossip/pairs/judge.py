"""Judgement of messages, by what an honest neighbour can have sent: the boundary of trust of a run without rounds.

It is to these runs what `gossip.judge` is to those with rounds: `wire` has checked the form, the meaning is judged here
before anything is kept, and nothing changes.
"""

from __future__ import annotations

from collections.abc import Collection

from peer.errors import RemoteProtocolError
from peer.gossip.moniqua import check_repair
from peer.gossip.pairs.model import PairModel
from peer.gossip.pairs.responder import Responder
from peer.gossip.value_bounds import excess
from peer.wire.message import Message, MessageKind

MOST_EXCHANGES = 1 << 48
"""More exchanges than any peer makes, though each restart leaves out 2^16 numbers."""


def judge(message: Message, neighbors: Collection[int], model: PairModel, responder: Responder) -> float:
    """Return how far a message moves the model (`plausibility`). Raises RemoteProtocolError, which names the sender,
    unless an honest peer would send this to the peer now."""
    sender, kind = message.sender, message.kind
    if sender not in neighbors:
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
        model.coding.check(message)
        largest = excess(message, model.x.dtype, model.node)
        if largest is not None:
            raise RemoteProtocolError(f"has diverged: it sent numbers up to {largest:.3g}", peer=sender)
        reach = model.coding.reach(message)
        model.reaches.check(model.staleness.steps, message, reach, model.norm)
        return reach
    if kind is MessageKind.REPAIR and (waiting := responder.waiting_for(message)) is not None:
        check_repair(message, waiting.wishes, waiting.request.layers, model.x.dtype)
    return 0.0
