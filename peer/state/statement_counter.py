"""The counter of a peer's statements: no number is used twice, however the process ends in between.

Numbers are reserved on disk in blocks, so that a statement costs no sync of its own; a restart leaves the rest of a
block out. A process begins with the milliseconds since 1970 at least: a peer that lost its state folder does not use
numbers again that others know.
"""

from __future__ import annotations

import threading

from peer.state.disk import Disk
from peer.state.kept_file import KeptFile

RESERVED = KeptFile[int](
    "statements", int, int, "rename it, and check the clock of this device before you start the peer again"
)
_BLOCK = 1024


class StatementCounter:
    """Counts the statements of one peer. May be used from several threads."""

    def __init__(self, disk: Disk, now: float) -> None:
        """`now`: seconds since 1970. Raises StateError if the file of the counter cannot be read."""
        self._disk, self._lock = disk, threading.Lock()
        self._reserved = self._last = max(RESERVED.read(disk) or 0, int(now * 1000))

    def next(self) -> int:
        """Return a number higher than all before. Raises StateError if it cannot be reserved."""
        with self._lock:
            self._last += 1
            if self._last > self._reserved:
                upto = self._last + _BLOCK
                RESERVED.keep(self._disk, upto)
                self._reserved = upto
            return self._last
