"""The last lines of logs on this machine."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from peer.foreign_text import printable

MOST_LINES = 200
_FIRST_BYTES = 4096
_MOST_BYTES = 65_536
"""Most bytes of one log in one look; a log that grows faster is read at its end."""


class Logs:
    """Reads additions to some files."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """`files` are by name of the peer."""
        self._files = files
        self._places: dict[str, int] = {}
        self.lines: deque[tuple[str, str]] = deque(maxlen=MOST_LINES)
        """(peer, line), the newest last."""

    def read(self) -> None:
        """Take the lines that were added since the last call."""
        for name, file in self._files.items():
            with contextlib.suppress(OSError), open(file, "rb") as opened:
                size = opened.seek(0, 2)
                place = self._places.get(name)
                if place is None or place > size:  # The first look; or somebody made it shorter.
                    place = max(0, size - _FIRST_BYTES)
                cut = max(place, size - _MOST_BYTES)
                opened.seek(cut)
                whole, newline, _ = opened.read(size - cut).rpartition(b"\n")
                self._places[name] = cut + len(whole) + len(newline)
                lines = whole.decode(errors="replace").splitlines() if newline else []
                self.lines.extend((name, printable(line)) for line in lines if line.strip())
