"""The audit trail of a peer: everything that a proof of the conservation of mass needs, round by round.

Off by default (`state.ledger`), since it writes every model and every frame. For each round there is one file
`round-<t>.npz` with `x` and `u` after the round, the frames sent in it, and whose messages of which rounds were applied
in it. Mass in flight is what others sent and the ledger of the receiver does not list as applied yet.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from peer.gossip.base import Algorithm


class Ledger:
    """Collects the frames of a round and writes them when it closes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._entries: list[tuple[str, int, int, bytes]] = []
        self._lock = threading.Lock()

    def observe(self, what: str, round_: int, other: int, frame: bytes) -> None:
        """Take note of a frame "sent" to a neighbour, or (without the frame) of one from it that was "applied"."""
        with self._lock:
            self._entries.append((what, round_, other, frame))

    def close_round(self, round_: int, algorithm: Algorithm) -> None:
        """Write what happened up to the end of a round."""
        with self._lock:
            entries, self._entries = self._entries, []
        np.savez(
            self.directory / f"round-{round_:06d}.npz",
            x=algorithm.x,
            u=np.array([algorithm.u]),
            what=np.array([entry[0] for entry in entries], dtype="U8"),
            rounds=np.array([entry[1] for entry in entries], dtype=np.int64),
            others=np.array([entry[2] for entry in entries], dtype=np.int64),
            lengths=np.array([len(entry[3]) for entry in entries], dtype=np.int64),
            frames=np.frombuffer(b"".join(entry[3] for entry in entries), dtype=np.uint8),
        )
