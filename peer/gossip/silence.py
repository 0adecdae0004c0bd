"""Silent receivers: those that get no weight because they have confirmed nothing for too long.

A message of push-sum carries a part of its sender's mass, which is in nobody's model until the receiver has it. A peer
that kept giving to a receiver that cannot be reached would end with all its mass in messages that wait for a link. It
therefore keeps the weight of such a receiver. The receiver still gets messages: they say that there is nothing for it,
or advance the replica that it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping


class Silence:
    """Receipts of each receiver. The time is always an argument.

    The time since the last *new* receipt decides, not the number of unconfirmed frames: a fast sender on a slow link
    has many of these, and one that waits for its neighbours has few, whether or not anybody is there.
    """

    def __init__(self, after_s: float) -> None:
        """`after_s`: seconds without a receipt that make a receiver silent. Receivers confirm about once a second."""
        self._after_s = after_s
        self._confirmed: dict[int, int] = {}
        self._heard_at: dict[int, float] = {}

    def silent(self, links: Mapping[int, tuple[int, int]], now: float) -> frozenset[int]:
        """Return the receivers to leave out now. `links`: receiver → (number of our frames that it has confirmed,
        number of frames for it)."""
        for receiver, (confirmed, made) in links.items():
            if confirmed == made or confirmed > self._confirmed.get(receiver, -1):
                self._confirmed[receiver], self._heard_at[receiver] = confirmed, now
        return frozenset(receiver for receiver in links if now - self._heard_at[receiver] > self._after_s)
