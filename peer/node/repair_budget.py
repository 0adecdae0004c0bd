"""How much a neighbour may ask for that costs this peer more than it costs the neighbour.

What is over a budget is not lost for an honest neighbour: it comes again.
"""

from __future__ import annotations

from peer.wire.message import Message


class RepairBudget:
    """Lets each neighbour have one answer to each request on a connection.

    A few bytes ask for a whole model. Requests for modulo codes are told apart by round and phase, of which few can be
    answered at all. Replicas are sent as they are: more than one answer in a round would say the same.
    """

    def __init__(self) -> None:
        self._answered: dict[int, tuple[int, ...]] = {}

    def connected(self, peer: int) -> None:
        """Allow a neighbour to repeat what it asked for: the answer may have been on its way."""
        self._answered.pop(peer, None)

    def allows(self, request: Message, own_round: int) -> bool:
        """Return whether to answer a request. `own_round`: the rounds that are done here."""
        return _order(request, own_round) > self._answered.get(request.sender, (-1,))

    def answered(self, request: Message, own_round: int) -> None:
        """Take note of a request that was answered."""
        self._answered[request.sender] = _order(request, own_round)


def _order(request: Message, own_round: int) -> tuple[int, ...]:
    return (request.round, request.phase) if request.phase else (own_round,)
