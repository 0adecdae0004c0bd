"""Limit of requests that cost this peer more than the neighbour that makes them."""

from __future__ import annotations

from peer.errors import RemoteProtocolError
from peer.rate_limits import Allowances
from peer.wire.message import Message

_AGAIN = {"rate": 0.5, "burst": 32.0}
"""Requests of one neighbour that were answered before, per second: over a new connection, or because its count of
rounds is ahead of ours. A neighbour that sends more of them wants work done, not a repair."""


class RepairBudget:
    """Lets each neighbour have one answer to each request on a connection.

    A few bytes ask for a whole model. Requests for modulo codes are distinguished by round and phase, of which few can
    be answered at all. Replicas are sent as they are: a second answer in a round would be the same.
    """

    def __init__(self) -> None:
        self._answered: dict[int, tuple[int, ...]] = {}
        self._reconnected: set[int] = set()
        """Neighbours that may repeat a request once: the answer may have been on its way."""
        self._again = Allowances(**_AGAIN)

    def connected(self, peer: int) -> None:
        """Allow a neighbour to repeat its requests."""
        self._reconnected.add(peer)

    def allows(self, request: Message, own_round: int, now: float) -> bool:
        """Return whether to answer a request; `own_round`: the rounds that are done here. Raises RemoteProtocolError
        for one of too many repetitions."""
        peer = request.sender
        if _order(request, own_round) > self._answered.get(peer, (-1,)):
            return True
        if not self._again.spend(peer, now):
            raise RemoteProtocolError("asks for the same repair again and again", peer=peer)
        return peer in self._reconnected

    def answered(self, request: Message, own_round: int) -> None:
        """Note a request that was answered."""
        self._reconnected.discard(request.sender)
        self._answered[request.sender] = _order(request, own_round)


def _order(request: Message, own_round: int) -> tuple[int, ...]:
    return (request.round, request.phase) if request.phase else (own_round,)
