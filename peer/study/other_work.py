"""Whether the machine was at rest while something was measured: how many processors others kept busy meanwhile.

The load average tells that badly: eight peers of ours are a part of it, and what ran a minute ago, too.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

_WAITING = (3, 4)
"""Columns of /proc/stat that are no work: idle, and waiting for a disk."""
_COUNTED_TWICE = 8
"""From this column on: guests, whose time is in user and nice already."""


class OtherWork:
    """Counts, from when it is made, what was computed here and not by this process or children that have ended."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._before = others_cpu_s()

    def processors(self) -> float:
        """Return how many processors others kept busy, on average; time that a hypervisor took counts as well."""
        seconds = max(time.monotonic() - self._since, 1e-9)
        return max(0.0, (others_cpu_s() - self._before) / seconds)


def others_cpu_s() -> float:
    """Return the seconds that all processors worked since the machine started, less those of this process and of
    children that it has waited for. Sampled every hundredth of a second."""
    columns = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    ticks = sum(value for column, value in enumerate(columns[:_COUNTED_TWICE]) if column not in _WAITING)
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return ticks / os.sysconf("SC_CLK_TCK") - sum(usage.ru_utime + usage.ru_stime for usage in own)
