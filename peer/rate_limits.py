"""Rate limits of actions that cost their sender nothing: small messages, membership notices, and lines in the log.

Pure: the time is an argument, in seconds. A neighbour's model messages are bounded elsewhere, by its credit and by the
number of rounds that it can be ahead (`peer.net.chunks`, `peer.gossip.session`).
"""

from __future__ import annotations

from collections.abc import Hashable


class Allowance:
    """A token bucket."""

    def __init__(self, *, rate: float, burst: float, now: float) -> None:
        """Allow `rate` units a second, and `burst` of them after a pause."""
        self.rate, self.burst = rate, burst
        self._left, self._at = burst, now

    def spend(self, units: float, now: float) -> bool:
        """Return whether so many units are allowed now; then they are used up."""
        self._refill(now)
        if units > self._left:
            return False
        self._left -= units
        return True

    def give_back(self, units: float) -> None:
        """Return units that were spent on nothing."""
        self._left = min(self.burst, self._left + units)

    def wait_s(self, units: float, now: float) -> float:
        """Use up so many units, future ones included; return the seconds until they are there."""
        self._refill(now)
        self._left -= units
        return max(0.0, -self._left / self.rate)

    def _refill(self, now: float) -> None:
        # A clock that was put back takes nothing away.
        self._left = min(self.burst, self._left + max(0.0, now - self._at) * self.rate)
        self._at = now


class Allowances:
    """A token bucket for each of a few senders or subjects."""

    def __init__(self, *, rate: float, burst: float) -> None:
        """Allow each of them `rate` units a second, and `burst` after a pause."""
        self._rate, self._burst = rate, burst
        self._allowances: dict[Hashable, Allowance] = {}

    def spend(self, key: Hashable, now: float, units: float = 1) -> bool:
        """Return whether so many units are allowed to one of them now; then they are used up."""
        unused = Allowance(rate=self._rate, burst=self._burst, now=now)
        return self._allowances.setdefault(key, unused).spend(units, now)

    def give_back(self, key: Hashable) -> None:
        """Return the unit that was spent last on one of them, and on nothing."""
        self._allowances[key].give_back(1)


class Complaints:
    """Decides which complaints about strangers are logged: frequent connections must not fill the disk."""

    def __init__(self, *, per_minute: int, now: float) -> None:
        self._allowance = Allowance(rate=per_minute / 60, burst=per_minute, now=now)
        self._suppressed = 0

    def worth_a_line(self, now: float) -> str | None:
        """Return an addition to the line ("" or the number of lines left out before it); None if it is left out
        itself."""
        if not self._allowance.spend(1, now):
            self._suppressed += 1
            return None
        left_out, self._suppressed = self._suppressed, 0
        return f" ({left_out} more like this were not logged)" if left_out else ""
