"""The serial log of one peer in the form of scenario files.

Replaying the logs of all peers, merged into one, gives the same models as the run did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Event: TypeAlias = tuple[Any, ...]
"""("read", i), ("mix", initiator, responder, exchange), ("step", i, γ)."""

_KINDS = ("read", "step", "mix")


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
