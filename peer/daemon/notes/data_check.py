"""Whether the neighbours read the same data: each device splits it alone, so of different data the shares overlap."""

from __future__ import annotations

import logging
from collections.abc import Callable

from peer.daemon.notes import notes

log = logging.getLogger("sotto")


class DataCheck:
    """Compares digests of training and test set."""

    def __init__(self, train: bytes, test: bytes, name: Callable[[int], str]) -> None:
        self.note = notes.encode_data(train, test)
        """Note for a neighbour when it is connected."""
        self._own = {"training": train, "test": test}
        self._name = name
        self._warned: set[int] = set()

    def heard(self, source: int, note: bytes) -> None:
        """Log once for each neighbour if it reads other data. Raises RemoteProtocolError if it is malformed."""
        theirs = dict(zip(self._own, notes.decode_data(note), strict=True))
        different = [split for split, digest in self._own.items() if theirs[split] != digest]
        if different and source not in self._warned:
            self._warned.add(source)
            log.warning(
                "%s reads other %s data than this device: the shares of the peers then overlap, or leave samples out."
                ' Copy the same data to both, or set data.partition = "own" if each device has its own',
                self._name(source),
                " and ".join(different),
            )
