"""The logs of peers without rounds: read from an audit log, and merged into the log of all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from peer.compress.payload import FloatArray
from peer.gossip.pairs.events import Event
from peer.gossip.pairs.node import PairNode


def read_event_log(directory: Path, num_parameters: int) -> tuple[list[Event], FloatArray]:
    """Return the contents of an `EventLog`: the events, and the gradients float32[steps, n]."""
    lines = (directory / "events.jsonl").read_text().splitlines()
    gradients = np.fromfile(directory / "gradients.bin", dtype=np.float32)
    return [tuple(json.loads(line)) for line in lines], gradients.reshape(-1, num_parameters)


def merge_events(logs: Sequence[Sequence[Event]]) -> list[Event]:
    """Return one serial log made of the logs of all peers (position: peer).

    A mix stands in the logs of both ends and happens once, when it is next in both. That always goes on: a peer is in
    one exchange at a time, and its events between request and reply touch nobody else. Raises ValueError if the logs do
    not belong together.
    """
    positions = [0] * len(logs)
    merged: list[Event] = []
    waiting = list(range(len(logs)))[::-1]
    while waiting:
        i = waiting.pop()
        while positions[i] < len(logs[i]):
            event = logs[i][positions[i]]
            if event[0] != "mix":
                merged.append(event)
                positions[i] += 1
                continue
            j = event[1] if event[2] == i else event[2]
            if positions[j] >= len(logs[j]) or logs[j][positions[j]] != event:
                break
            merged.append(event)
            positions[i] += 1
            positions[j] += 1
            waiting.append(j)
    if any(position < len(log) for position, log in zip(positions, logs, strict=True)):
        raise ValueError("the logs of these peers do not belong to one run")
    return merged


def next_exchange(peer: PairNode) -> int:
    """Return the number of a peer's next own request, as its state has it."""
    return int(peer.state()["counters"][0])
