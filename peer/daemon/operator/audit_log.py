"""The audit log of a peer: everything that a proof of the conservation of mass needs, for each round.

Off by default (`state.ledger`), since it writes every model and every frame. For each round there is one file
`round-<t>.npz` with `x` and `u` after the round, the frames sent in it, and whose messages of which rounds were applied
in it. Mass in flight was sent by others and is not yet listed as applied in the receiver's log.

Asynchronous peers have no rounds. They keep an `EventLog`; replaying the merged logs of all of them is the proof.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from peer.compress.payload import FloatArray
from peer.gossip.base import Algorithm
from peer.gossip.pairs.events import Event
from peer.state.disk import writing


class AuditLog:
    """Collects the frames of a round and writes them when it closes. Raises StateError if the disk refuses."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with writing(directory.name):
            directory.mkdir(parents=True, exist_ok=True)
        self._entries: list[tuple[str, int, int, bytes]] = []
        self._lock = threading.Lock()

    def observe(self, what: str, round_: int, other: int, frame: bytes) -> None:
        """Record a frame that was "sent" to a neighbour, "gave" it a share, or "returned" because it is lost; or, with
        an empty frame, a message from it that was "applied", or a share that it "took"."""
        with self._lock:
            self._entries.append((what, round_, other, frame))

    def close_round(self, round_: int, algorithm: Algorithm) -> None:
        """Write the events up to the end of a round."""
        with self._lock:
            entries, self._entries = self._entries, []
        name = f"round-{round_:06d}.npz"
        with writing(name):
            np.savez(
                self.directory / name,
                x=algorithm.x,
                u=np.array([algorithm.u]),
                what=np.array([entry[0] for entry in entries], dtype="U8"),
                rounds=np.array([entry[1] for entry in entries], dtype=np.int64),
                others=np.array([entry[2] for entry in entries], dtype=np.int64),
                lengths=np.array([len(entry[3]) for entry in entries], dtype=np.int64),
                frames=np.frombuffer(b"".join(entry[3] for entry in entries), dtype=np.uint8),
            )


class EventLog:
    """The serial log of one asynchronous peer.

    `events.jsonl` holds one event a line, as in scenario files: ["read", i], ["mix", i, j, exchange], ["step", i, γ].
    `gradients.bin` holds the gradient of each step, in the order of the steps: float32[n] after float32[n].
    """

    def __init__(self, directory: Path) -> None:
        """Open, or go on writing, the two files. This and the following raise StateError if the disk refuses."""
        self._name = directory.name
        with writing(self._name):
            directory.mkdir(parents=True, exist_ok=True)
            self._events = open(directory / "events.jsonl", "ab")  # noqa: SIM115 - open for as long as the peer runs
            self._gradients = open(directory / "gradients.bin", "ab")  # noqa: SIM115

    def write(self, events: Sequence[Event], gradient: FloatArray | None = None) -> None:
        """Append events whose place is final, and the gradient of a step."""
        with writing(self._name):
            self._events.writelines(json.dumps(event).encode() + b"\n" for event in events)
            if gradient is not None:
                self._gradients.write(np.ascontiguousarray(gradient).tobytes())

    def position(self) -> list[int]:
        """Return how long the files are, after everything is in them: for `go_back`."""
        with writing(self._name):
            for file in (self._events, self._gradients):
                file.flush()
            return [self._events.tell(), self._gradients.tell()]

    def go_back(self, position: Sequence[int]) -> None:
        """Forget events written after `position` was taken."""
        with writing(self._name):
            for file, length in zip((self._events, self._gradients), position, strict=True):
                file.flush()
                file.truncate(length)
                file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Close the files."""
        with writing(self._name):
            self._events.close()
            self._gradients.close()
