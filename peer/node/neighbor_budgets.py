"""How much a neighbour may ask for, and tell, that costs this peer more than it costs the neighbour.

Pure: the time is an argument. What is over a budget is not lost for an honest neighbour: it comes again.
"""

from __future__ import annotations

from peer.errors import RemoteProtocolError
from peer.wire.message import Message

NOTICES_AT_ONCE = 256
NOTICES_PER_S = 8.0
"""Each membership notice costs a sync of the disk, and one more message to each neighbour. Honest ones come in bursts
when many peers join or leave at once."""


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


class NoticeBudget:
    """Bounds how many membership notices each neighbour tells in a time."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[float, float]] = {}
        """Neighbour → (notices that it may tell, as of when)."""

    def spend(self, peer: int, now: float) -> None:
        """Count a notice of a neighbour. Raises RemoteProtocolError where it tells too many."""
        left, since = self._left.get(peer, (float(NOTICES_AT_ONCE), now))
        left = min(float(NOTICES_AT_ONCE), left + NOTICES_PER_S * max(0.0, now - since))
        if left < 1.0:
            self._left[peer] = (left, now)
            raise RemoteProtocolError(f"tells of more than {NOTICES_AT_ONCE} changes of members at once", peer=peer)
        self._left[peer] = (left - 1.0, now)
