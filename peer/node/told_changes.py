"""How often each neighbour has told of a change of members that was known.

Such a notice changes nothing. It is journaled like any frame, because a receipt is only given for what the journal
holds, but nothing has to be synced for it. An honest peer tells each of its neighbours of a change once, and again
where the two have become neighbours anew.
"""

from __future__ import annotations

from collections import Counter

from peer.errors import RemoteProtocolError
from peer.gossip.membership import Change

_MOST_TIMES = 16


class ToldChanges:
    """Counts for one peer, since its process began."""

    def __init__(self) -> None:
        self._times: Counter[tuple[int, Change]] = Counter()

    def told(self, sender: int, change: Change) -> None:
        """Count a notice of a known change. Raises RemoteProtocolError, which names the sender, for one too many."""
        if self._times[sender, change] >= _MOST_TIMES:
            again = f"told {_MOST_TIMES} times before that peer {change.subject} changes by {change.kind.name}"
            raise RemoteProtocolError(again, peer=sender)
        self._times[sender, change] += 1
