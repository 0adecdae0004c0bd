"""Starved push-sum peers: those with too little weight to give any away.

A column-stochastic matrix gives a fixed part of u to the out-neighbours, round after round. A peer whose in-neighbours
are late, or cut off, gets nothing in return; all of its weight would go to the peers that it can reach. A model divided
by a vanishing weight is little more than its compression error.
"""

from __future__ import annotations

STARVED_BELOW = 0.9
"""A push-sum peer with less than this part of its usual weight gives none away while neighbours owe it messages.
With half of it the parts of a divided cluster held their ground as well, but weight ran to the ends of each. When it
flowed back, the copies of quant-sgp (top 2 %) could not follow: 71 % in place of 96 % for the worst peer."""
_USUAL_ROUNDS = 64
"""Rounds over which the usual weight is averaged. It has to adapt: with a fixed limit, a cluster that lost more than
that for good would never mix again."""


class UsualWeight:
    """The running mean of one peer's push-sum weight."""

    def __init__(self) -> None:
        self.value = 1.0

    def is_starved(self, u: float) -> bool:
        """Return whether a peer with weight u has to keep it."""
        return u < STARVED_BELOW * self.value

    def note(self, u: float) -> None:
        """Note the weight with which a round begins."""
        self.value += (u - self.value) / _USUAL_ROUNDS
