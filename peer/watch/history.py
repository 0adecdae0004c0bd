"""One figure of all peers by round, in memory that does not grow with the rounds: means of groups of rounds.

When a run outgrows the groups, two become one. Repeated rounds replace the earlier ones.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

GROUPS = 256
"""Points of one curve at most: more than a chart has room for."""

MOST_PEERS = 1 << 16
"""Peers with higher numbers have no curve."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class History:
    """Curves of one figure."""

    def __init__(self) -> None:
        self.version = 0
        """Grows with every change."""
        self._size = 1
        """Rounds in a group."""
        self._sums: Floats = np.zeros((0, GROUPS))
        self._counts: Ints = np.zeros((0, GROUPS), dtype=np.int64)
        self._last: Ints = np.zeros(0, dtype=np.int64)
        """Last round of each peer; −1 before the first."""

    @property
    def num_peers(self) -> int:
        return len(self._last)

    def put(self, peers: Ints, rounds: Ints, values: Floats) -> None:
        """Add values: int64[k], int64[k], float64[k], the rounds of each peer ascending. NaN is left out."""
        known = np.isfinite(values) & (rounds >= 0) & (peers >= 0) & (peers < MOST_PEERS)
        peers, rounds, values = peers[known], rounds[known], values[known]
        if not len(peers):
            return
        self.version += 1
        self._grow(int(peers.max()) + 1)
        self._set_back(peers, rounds)
        while int(rounds.max()) // self._size >= GROUPS:
            self._halve()
        groups = rounds // self._size
        np.add.at(self._sums, (peers, groups), values)
        np.add.at(self._counts, (peers, groups), 1)
        np.maximum.at(self._last, peers, rounds)

    def curve(self, peer: int) -> list[tuple[float, float]]:
        """Return (last round of a group, mean) of one peer."""
        if peer >= self.num_peers:
            return []
        groups = np.flatnonzero(self._counts[peer])
        means = self._sums[peer, groups] / self._counts[peer, groups]
        return list(zip(self._ends(groups, int(self._last[peer])), means.tolist(), strict=True))

    def means(self) -> tuple[list[float], Floats]:
        """Return the last round of each group that any peer has, and float64[groups, peers]: NaN where one has none."""
        groups = np.flatnonzero(self._counts.any(axis=0))
        counts = self._counts[:, groups]
        with np.errstate(invalid="ignore"):
            means = self._sums[:, groups] / np.where(counts, counts, np.nan)
        return self._ends(groups, int(self._last.max(initial=-1))), means.T

    def _ends(self, groups: npt.NDArray[np.intp], last: int) -> list[float]:
        return [float(min((group + 1) * self._size - 1, last)) for group in groups.tolist()]

    def _grow(self, peers: int) -> None:
        more = peers - self.num_peers
        if more > 0:
            self._sums = np.vstack([self._sums, np.zeros((more, GROUPS))])
            self._counts = np.vstack([self._counts, np.zeros((more, GROUPS), dtype=np.int64)])
            self._last = np.concatenate([self._last, np.full(more, -1)])

    def _set_back(self, peers: Ints, rounds: Ints) -> None:
        """Forget repeated rounds: those of a peer from its first in `rounds` on."""
        for peer in np.unique(peers[rounds <= self._last[peers]]).tolist():
            first = int(rounds[peers == peer].min())
            self._sums[peer, first // self._size :] = 0.0
            self._counts[peer, first // self._size :] = 0
            self._last[peer] = first - 1

    def _halve(self) -> None:
        self._size *= 2
        self._sums, self._counts = _in_pairs(self._sums), _in_pairs(self._counts)


Number = TypeVar("Number", np.float64, np.int64)


def _in_pairs(values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Return the sums of neighbouring columns, and zeros in the columns that became free."""
    paired: npt.NDArray[Number] = values.reshape(len(values), GROUPS // 2, 2).sum(axis=2)
    return np.hstack([paired, np.zeros_like(paired)])
