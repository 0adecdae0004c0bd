"""The decisions of a bandwidth budget on disk: what rounds that are repeated after a crash have to use again.

One text line for each decision, "round variant", written and synced before anything is sent that came of it. The
neighbours may have the messages of such a round, so that the same ones have to be made again: with the same decisions
a peer that was killed computes the same bits as one that was not.
"""

from __future__ import annotations

import os
from pathlib import Path

from peer.errors import StateError


class DecisionLog:
    """The file of one peer."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it. Raises StateError if it cannot be used."""
        self._path = path
        try:
            self._file = open(path, "a+b")  # noqa: SIM115 - held open for as long as the peer runs
        except OSError as error:
            raise StateError(f"{path}: cannot be written: {error.strerror}") from None

    def read(self) -> dict[int, int]:
        """Return round → variant. A last line that was cut off is removed: nothing was sent by it."""
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        try:
            pairs = [line.split() for line in whole.decode("ascii").splitlines()]
            return {int(round_): int(variant) for round_, variant in pairs}
        except ValueError:
            raise StateError(f"{self._path}: is damaged; it belongs to the checkpoints beside it") from None

    def append(self, round_: int, variant: int) -> None:
        """Add a decision durably. Raises StateError if the disk refuses."""
        try:
            self._file.write(b"%d %d\n" % (round_, variant))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StateError(f"{self._path}: cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()
