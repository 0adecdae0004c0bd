"""Which receivers have confirmed nothing for so long that they get no weight until they do.

A message of push-sum carries a part of its sender's mass, which is in nobody's model until the receiver has it. A peer
that kept giving to a receiver that cannot be reached would end with all its mass in messages that wait for a link. So
it keeps the weight of such a receiver for itself. The receiver still gets messages: they say that there is nothing for
it, or advance the replica that it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping


class Silence:
    """What is known of the receipts of each receiver. The time is always an argument.

    The time since the last *new* receipt decides, not the number of unconfirmed frames: a fast sender on a slow link
    has many of these, and one that waits for its neighbours has few, whether or not anybody is there.
    """

    def __init__(self, after_s: float) -> None:
        """`after_s`: how long nothing may be confirmed. Receivers confirm about once a second."""
        self._after_s = after_s
        self._confirmed: dict[int, int] = {}
        self._heard_at: dict[int, float] = {}

    def silent(self, links: Mapping[int, tuple[int, int]], now: float) -> frozenset[int]:
        """Return who is to be left out now. `links`: receiver → (how many of our frames it has confirmed, how many
        there are for it)."""
        for receiver, (confirmed, made) in links.items():
            if confirmed == made or confirmed > self._confirmed.get(receiver, -1):
                self._confirmed[receiver], self._heard_at[receiver] = confirmed, now
        return frozenset(receiver for receiver in links if now - self._heard_at[receiver] > self._after_s)
