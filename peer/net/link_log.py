"""Log lines about neighbours. Each neighbour has a budget, since its conduct decides how many lines there are."""

from __future__ import annotations

import logging
import time

from peer.rate_limits import Complaints

_LINES_PER_MINUTE = 20


class LinkLog:
    """Logs events on the links of one peer, at most 20 lines at once and per minute about each neighbour."""

    def __init__(self) -> None:
        self._budgets: dict[int, Complaints] = {}

    def write(self, logger: logging.Logger, level: int, peer: int, line: str, *values: object) -> None:
        """Log a line about a neighbour, unless there were too many about it; those left out are counted."""
        now = time.monotonic()
        budget = self._budgets.setdefault(peer, Complaints(per_minute=_LINES_PER_MINUTE, now=now))
        more = budget.worth_a_line(now)
        if more is not None:
            logger.log(level, line + "%s", *values, more)
