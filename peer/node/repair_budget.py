"""How much a neighbour may ask for that costs this peer more than it costs the neighbour."""

from __future__ import annotations

from peer.errors import RemoteProtocolError
from peer.rate_limits import Allowances
from peer.wire.message import Message

_AGAIN = {"rate": 0.5, "burst": 32.0}
"""Requests of one neighbour that were answered before, by second: over a new connection, or because its clock of rounds
is ahead of ours. Whoever sends more of them wants work done, not a repair."""


class RepairBudget:
    """Lets each neighbour have one answer to each request on a connection.

    A few bytes ask for a whole model. Requests for modulo codes are told apart by round and phase, of which few can be
    answered at all. Replicas are sent as they are: more than one answer in a round would say the same.
    """

    def __init__(self) -> None:
        self._answered: dict[int, tuple[int, ...]] = {}
        self._reconnected: set[int] = set()
        """Who may repeat what it asked for, once: the answer may have been on its way."""
        self._again = Allowances(**_AGAIN)

    def connected(self, peer: int) -> None:
        """Allow a neighbour to repeat what it asked for."""
        self._reconnected.add(peer)

    def allows(self, request: Message, own_round: int, now: float) -> bool:
        """Return whether to answer a request; `own_round`: the rounds that are done here. Raises RemoteProtocolError
        for one of too many that say the same."""
        peer = request.sender
        if _order(request, own_round) > self._answered.get(peer, (-1,)):
            return True
        if not self._again.spend(peer, now):
            raise RemoteProtocolError("asks for the same repair again and again", peer=peer)
        return peer in self._reconnected

    def answered(self, request: Message, own_round: int) -> None:
        """Take note of a request that was answered."""
        self._reconnected.discard(request.sender)
        self._answered[request.sender] = _order(request, own_round)


def _order(request: Message, own_round: int) -> tuple[int, ...]:
    return (request.round, request.phase) if request.phase else (own_round,)
