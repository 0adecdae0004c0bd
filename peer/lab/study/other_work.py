"""Idleness of the machine during a measurement: the number of processors that other work kept busy.

The load average does not show that: it includes the peers of the measurement, and anything that ran a minute ago.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

_WAITING = (3, 4)
"""Columns of /proc/stat that are not work: idle, and waiting for a disk."""
_COUNTED_TWICE = 8
"""First of the columns with time of guests, which the columns user and nice already include."""


class OtherWork:
    """Measures, from its creation, the processor time used on this machine by other programs than this one.

    Children count as this program's once they have ended and were waited for.
    """

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._before = others_cpu_s()

    def processors(self) -> float:
        """Return how many processors other work kept busy on average, including time that a hypervisor took."""
        seconds = max(time.monotonic() - self._since, 1e-9)
        return max(0.0, (others_cpu_s() - self._before) / seconds)


def others_cpu_s() -> float:
    """Return the processor seconds used since the machine started, without those of this process and of children that
    it has waited for. The kernel counts in hundredths of a second."""
    columns = [int(word) for word in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]]
    ticks = sum(value for column, value in enumerate(columns[:_COUNTED_TWICE]) if column not in _WAITING)
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return ticks / os.sysconf("SC_CLK_TCK") - sum(usage.ru_utime + usage.ru_stime for usage in own)
