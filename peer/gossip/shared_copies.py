"""Copies of peers' models that all peers of one process keep once.

All receivers of a peer build the same copy x̂ of it, by the same additions (`replicas`). If many peers live in one
process and frames come through unchanged, one array stands for all copies that hold the same differences of the same
peer: 17 neighbours need no more memory than one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from peer.compress.payload import FloatArray, Kept

Check: TypeAlias = tuple[int, tuple[int, ...]]
"""Round and digests of the layers of a copy."""


class SharedCopies:
    """The copies in use, by peer and number of differences. The arrays cannot be written to."""

    def __init__(self) -> None:
        self._copies: WeakValueDictionary[tuple[int, int], Kept] = WeakValueDictionary()
        self._starts: list[Kept] = []
        """Arrays at which all copies start; one, unless peers start with different models."""
        self._checks: dict[int, Check] = {}
        """Peer → the newest check of its copies."""
        self._scratch: FloatArray | None = None

    def scratch(self, like: FloatArray) -> FloatArray:
        """Return an array like another that anybody may overwrite: its content is of no use after a call."""
        if self._scratch is None or self._scratch.dtype != like.dtype or self._scratch.shape != like.shape:
            self._scratch = np.empty_like(like)
        return self._scratch

    def start(self, values: Kept) -> Kept:
        """Return the array that holds the numbers with which a copy starts."""
        for start in self._starts:
            if start.dtype == values.dtype and np.array_equal(start, values):
                return start
        self._starts.append(_sealed(values.copy()))
        return self._starts[-1]

    def moved(self, peer: int, differences: int, before: Kept, change_: Callable[[Kept], None]) -> Kept:
        """Return the copy of `peer` that holds so many differences: the one in use, or a copy of `before` changed by
        `change_`."""
        found = self._copies.get((peer, differences))
        if found is None:
            found = before.copy()
            change_(found)
            self._copies[peer, differences] = _sealed(found)
        return found

    def check(self, peer: int, t: int, digests: Callable[[], tuple[int, ...]]) -> Check:
        """Return the check of the copies of `peer` after its difference of round t."""
        found = self._checks.get(peer)
        if found is None or found[0] != t:
            found = self._checks[peer] = t, digests()
        return found


def _sealed(values: Kept) -> Kept:
    values.flags.writeable = False
    return values
