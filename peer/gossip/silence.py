"""Which receivers have confirmed nothing for so long that they are left out until they do.

What a push-sum peer sends is a part of its mass, which is nobody's until the receiver has it. Where a receiver cannot
be reached, a peer that went on giving would lose all of it to messages that wait for a link. So it keeps the weight of
such a receiver, whose messages say that there is nothing for it (or bring, where it keeps a copy, what that needs).
"""

from __future__ import annotations

from collections.abc import Mapping


class Silence:
    """What is known of the receipts of each receiver. The time is always an argument."""

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
