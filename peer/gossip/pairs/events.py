"""The serial log of one peer in the form of scenario files, and one log of all of them.

Replaying the merged log gives the same models as the run did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Event: TypeAlias = tuple[Any, ...]
"""("read", i), ("mix", initiator, responder, exchange), ("step", i, γ)."""

_KINDS = ("read", "step", "mix")


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


def events_to_array(events: Sequence[Event]) -> npt.NDArray[np.float64]:
    """Return float64[events, 4]: the kind of each event and its numbers, filled up with zeros."""
    rows = [[float(_KINDS.index(event[0])), *map(float, event[1:])] for event in events]
    return np.array([row + [0.0] * (4 - len(row)) for row in rows], np.float64).reshape(-1, 4)


def events_from_array(rows: npt.NDArray[np.float64]) -> list[Event]:
    """Return the events that `events_to_array` was given."""
    return [_event(row) for row in rows]


def _event(row: npt.NDArray[np.float64]) -> Event:
    kind = _KINDS[int(row[0])]
    if kind == "read":
        return (kind, int(row[1]))
    if kind == "step":
        return (kind, int(row[1]), float(row[2]))
    return (kind, int(row[1]), int(row[2]), int(row[3]))
