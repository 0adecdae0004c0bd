"""One mixing matrix W, and its properties.

Convention: `W[i, j]` is the weight that receiver i gives to the messages of sender j. Every column sums to 1 (a sender
splits its mass and nothing else), every diagonal entry is positive (self-loop), no entry is negative.

Matrices are stored sparsely, by column and by row; a ring of 10,000 peers takes a megabyte. The properties are computed
on demand, then kept.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from peer.errors import ConfigError
from peer.gossip import graphs

IntArray: TypeAlias = npt.NDArray[np.int64]
Float64Array: TypeAlias = npt.NDArray[np.float64]

SUM_TOLERANCE = 1e-9
"""Allowed distance of a column's (or row's) sum from 1. Rounding of 10,000 weights stays below 1e-12; a file that
prints its weights with fewer than nine digits is refused, since the shortfall of a column would be lost in every
round."""

SYMMETRY_TOLERANCE = 1e-12
"""Allowed difference of W[i, j] and W[j, i] in a symmetric matrix."""

EXACT_DIAMETER_PEERS = 1 << 14
"""Up to this many peers the diameter of any graph is exact; above it, of graphs that look the same from every peer."""

DIAMETER_BLOCK = 1 << 10
"""Sources whose paths are followed at once."""


class MixingMatrix:
    """One matrix W, stored sparsely. Immutable; does not check itself (`check_matrix` does)."""

    def __init__(self, num_peers: int, senders: IntArray, receivers: IntArray, weights: Float64Array) -> None:
        """Take the entries W[receivers, senders] = weights, self-loops included, each position at most once."""
        self.num_peers = num_peers
        by_column = _sorted_by(senders, receivers, num_peers)
        self.column_starts: IntArray = np.searchsorted(senders[by_column], np.arange(num_peers + 1)).astype(np.int64)
        self.column_receivers: IntArray = receivers[by_column].astype(np.int64)
        self.column_weights: Float64Array = weights[by_column].astype(np.float64)
        by_row = _sorted_by(receivers, senders, num_peers)
        self.row_starts: IntArray = np.searchsorted(receivers[by_row], np.arange(num_peers + 1)).astype(np.int64)
        self.row_senders: IntArray = senders[by_row].astype(np.int64)
        self.row_weights: Float64Array = weights[by_row].astype(np.float64)
        self._shifted_columns: dict[tuple[int, ...], Float64Array | None] = {}

    @classmethod
    def from_dense(cls, w: Float64Array) -> MixingMatrix:
        """Return the matrix of `w: float64[n, n]`, its numbers unchanged."""
        receivers, senders = np.nonzero(w)
        return cls(w.shape[0], senders, receivers, w[receivers, senders])

    @property
    def num_edges(self) -> int:
        """Entries off the diagonal: messages of one round."""
        return int((self.column_receivers != self.column_senders).sum())

    @cached_property
    def column_senders(self) -> IntArray:
        """The sender of each entry, in the order of the columns."""
        return np.repeat(np.arange(self.num_peers), np.diff(self.column_starts))

    @cached_property
    def _row_receivers(self) -> IntArray:
        return np.repeat(np.arange(self.num_peers), np.diff(self.row_starts))

    def column(self, sender: int) -> tuple[IntArray, Float64Array]:
        """Return the shares of `sender`, its own included: receivers ascending, and W[receivers, sender]."""
        part = slice(self.column_starts[sender], self.column_starts[sender + 1])
        return self.column_receivers[part], self.column_weights[part]

    def row(self, receiver: int) -> tuple[IntArray, Float64Array]:
        """Return the senders to `receiver`, itself included: senders ascending, and W[receiver, senders]."""
        part = slice(self.row_starts[receiver], self.row_starts[receiver + 1])
        return self.row_senders[part], self.row_weights[part]

    def weight(self, receiver: int, sender: int) -> float:
        """Return W[receiver, sender], 0 if there is no edge."""
        # Faster than numpy's search for as few as there are in a row, and every message asks.
        end = int(self.row_starts[receiver + 1])
        place = bisect_left(self.row_senders, sender, int(self.row_starts[receiver]), end)
        return float(self.row_weights[place]) if place < end and self.row_senders[place] == sender else 0.0

    def senders(self, peer: int) -> tuple[int, ...]:
        """Return the senders to `peer`, itself left out, ascending."""
        return tuple(j for j in self.row(peer)[0].tolist() if j != peer)

    def receivers(self, peer: int) -> tuple[int, ...]:
        """Return the receivers of `peer`, itself left out, ascending."""
        return tuple(i for i in self.column(peer)[0].tolist() if i != peer)

    def dense(self) -> Float64Array:
        """Return a new float64[n, n]."""
        w = np.zeros((self.num_peers, self.num_peers))
        w[self.column_receivers, self.column_senders] = self.column_weights
        return w

    def apply(self, v: Float64Array) -> Float64Array:
        """Return W v. `v: float64[n]`."""
        terms = self.row_weights * v[self.row_senders]
        return sums_by_group(self._row_receivers, terms, self.num_peers)

    def column_sums(self) -> Float64Array:
        """Return float64[n]: 1ᵀW."""
        return sums_by_group(self.column_senders, self.column_weights, self.num_peers)

    def row_sums(self) -> Float64Array:
        """Return float64[n]: W1."""
        return self.apply(np.ones(self.num_peers))

    def diagonal(self) -> Float64Array:
        """Return float64[n]: the weight each peer keeps."""
        kept = np.zeros(self.num_peers)
        own = self.column_receivers == self.column_senders
        kept[self.column_receivers[own]] = self.column_weights[own]
        return kept

    @cached_property
    def is_doubly_stochastic(self) -> bool:
        """Whether rows sum to 1 too (columns always do)."""
        return bool((np.abs(self.row_sums() - 1.0) <= SUM_TOLERANCE).all())

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether W = Wᵀ."""
        return (
            np.array_equal(self.column_starts, self.row_starts)
            and np.array_equal(self.column_receivers, self.row_senders)
            and bool((np.abs(self.column_weights - self.row_weights) <= SYMMETRY_TOLERANCE).all())
        )

    @cached_property
    def is_mean(self) -> bool:
        """Whether every peer gets the mean of all."""
        weights = self.column_weights
        return len(weights) == self.num_peers**2 and bool(
            (np.abs(weights - 1.0 / self.num_peers) <= SUM_TOLERANCE).all()
        )

    @cached_property
    def is_strongly_connected(self) -> bool:
        """Whether there is a directed path from every peer to every other."""
        return graphs.is_strongly_connected(self.num_peers, self.column_senders, self.column_receivers)

    def shifted_column(self, shape: tuple[int, ...]) -> Float64Array | None:
        """Return the first column, float64[shape], if all columns are that one shifted over the group Z_a × Z_b × …;
        None otherwise.

        Peers are numbered row by row over `shape`, whose product is their number: (n,) for rings, exponential and
        complete graphs, the grid for a torus, (2, …, 2) for a hypercube.
        """
        if shape not in self._shifted_columns:
            self._shifted_columns[shape] = self._find_shifted_column(shape)
        return self._shifted_columns[shape]

    def _find_shifted_column(self, shape: tuple[int, ...]) -> Float64Array | None:
        counts = np.diff(self.column_starts)
        if (counts != counts[0]).any():
            return None
        offsets = np.zeros_like(self.column_receivers)
        receivers, senders, stride = self.column_receivers, self.column_senders, 1
        for size in reversed(shape):
            receivers, to = np.divmod(receivers, size)
            senders, of = np.divmod(senders, size)
            offsets += stride * ((to - of) % size)
            stride *= size
        table = (self.num_peers, int(counts[0]))
        offsets = offsets.reshape(table)
        order = np.argsort(offsets, axis=1)
        offsets = np.take_along_axis(offsets, order, axis=1)
        weights = np.take_along_axis(self.column_weights.reshape(table), order, axis=1)
        if (offsets != offsets[0]).any() or (weights != weights[0]).any():
            return None
        first = np.zeros(self.num_peers)
        first[offsets[0]] = weights[0]
        return first.reshape(shape)

    @cached_property
    def looks_alike_everywhere(self) -> bool:
        """Whether all columns are one of them shifted, in one of the ways in which the graph families are regular."""
        return any(self.shifted_column(shape) is not None for shape in graphs.shift_groups(self.num_peers))

    def diameter(self) -> tuple[int, bool]:
        """Return the largest number of hops between two peers of a strongly connected graph, and whether that is exact;
        if not, no two peers are further apart."""
        n = self.num_peers
        if not self.looks_alike_everywhere and n <= EXACT_DIAMETER_PEERS:
            return max(self._hops_from(first) for first in range(0, n, DIAMETER_BLOCK)), True
        farthest = int(graphs.distances(n, self.column_senders, self.column_receivers, 0).max())
        if self.looks_alike_everywhere:
            return farthest, True
        return farthest + int(graphs.distances(n, self.column_receivers, self.column_senders, 0).max()), False

    def _hops_from(self, first: int) -> int:
        """Return the largest number of hops from a block of peers to any peer.

        One bit for each source: `reached[i]` is the set of those that i has heard of, and one hop is a union over the
        row of i.
        """
        sources = np.arange(first, min(first + DIAMETER_BLOCK, self.num_peers))
        place = sources - first
        reached = np.zeros((self.num_peers, (sources.size + 63) // 64), dtype=np.uint64)
        reached[sources, place // 64] = np.uint64(1) << (place % 64).astype(np.uint64)
        full = np.bitwise_or.reduce(reached, axis=0)
        for hops in itertools.count():
            if (reached == full).all():
                return hops
            reached = np.bitwise_or.reduceat(reached[self.row_senders], self.row_starts[:-1], axis=0)
        raise AssertionError("a strongly connected graph has a diameter")

    def transposed(self) -> MixingMatrix:
        """Return Wᵀ, whose columns sum to 1 where W is doubly stochastic."""
        return MixingMatrix(self.num_peers, self.column_receivers, self.column_senders, self.column_weights)

    def without(self, peers: Collection[int]) -> MixingMatrix:
        """Return the matrix in which some peers have no edges: the weights of those edges stay with their other ends.

        Columns still sum to 1, and a symmetric matrix stays symmetric and doubly stochastic.
        """
        if not peers:
            return self
        gone = np.zeros(self.num_peers, dtype=bool)
        gone[sorted(peers)] = True
        kept = self.diagonal()
        senders, receivers, weights = self.column_senders, self.column_receivers, self.column_weights
        returned = gone[receivers] & ~gone[senders]
        # One after the other, in ascending order of the receivers: every peer adds up the same bits.
        np.add.at(kept, senders[returned], weights[returned])
        kept[gone] = 1.0
        stays = ~gone[receivers] & ~gone[senders] & (senders != receivers)
        return _with_diagonal(self.num_peers, senders[stays], receivers[stays], weights[stays], kept)

    def among(self, members: Sequence[int]) -> MixingMatrix:
        """Return the matrix over the positions of some peers, ascending, as if there were no others (`without`)."""
        members_array = np.asarray(members, dtype=np.int64)
        position = np.full(self.num_peers, -1, dtype=np.int64)
        position[members_array] = np.arange(members_array.size)
        left = self.without(np.flatnonzero(position < 0).tolist())
        inside = position[left.column_senders] >= 0
        senders, receivers = position[left.column_senders[inside]], position[left.column_receivers[inside]]
        return MixingMatrix(members_array.size, senders, receivers, left.column_weights[inside])

    def spread_over(self, num_peers: int, members: Sequence[int]) -> MixingMatrix:
        """Return the matrix over more peers: position i becomes `members[i]`, and the others keep their own mass."""
        members_array = np.asarray(members, dtype=np.int64)
        kept = np.ones(num_peers)
        kept[members_array] = self.diagonal()
        off = self.column_senders != self.column_receivers
        senders, receivers = members_array[self.column_senders[off]], members_array[self.column_receivers[off]]
        return _with_diagonal(num_peers, senders, receivers, self.column_weights[off], kept)


def _with_diagonal(
    num_peers: int, senders: IntArray, receivers: IntArray, weights: Float64Array, diagonal: Float64Array
) -> MixingMatrix:
    """Return the matrix of these edges, without self-loops, and this diagonal, float64[num_peers]."""
    peers = np.arange(num_peers)
    return MixingMatrix(
        num_peers,
        np.concatenate([senders, peers]),
        np.concatenate([receivers, peers]),
        np.concatenate([weights, diagonal]),
    )


def mean_matrix(matrices: Sequence[MixingMatrix]) -> MixingMatrix:
    """Return the mean of matrices of one size: it has an edge wherever one of them has it."""
    n = matrices[0].num_peers
    code = np.concatenate([m.column_senders * n + m.column_receivers for m in matrices])
    weights = np.concatenate([m.column_weights for m in matrices]) / len(matrices)
    codes, place = np.unique(code, return_inverse=True)
    senders, receivers = np.divmod(codes, n)
    return MixingMatrix(n, senders, receivers, sums_by_group(place, weights, codes.size))


def check_matrix(matrix: MixingMatrix, label: str) -> None:
    """Raise ConfigError for a matrix that breaks the convention."""
    if not np.isfinite(matrix.column_weights).all():
        raise ConfigError(f"{label} has a weight that is not a finite number", key="graph.weights")
    if (matrix.column_weights < 0).any():
        place = int(np.argmax(matrix.column_weights < 0))
        sender, receiver = int(matrix.column_senders[place]), int(matrix.column_receivers[place])
        raise ConfigError(
            f"{label} has a negative weight from peer {sender} to peer {receiver}",
            key="graph.weights",
            value=float(matrix.column_weights[place]),
            valid="0 or more",
        )
    sums = matrix.column_sums()
    worst = int(np.argmax(np.abs(sums - 1.0)))
    if abs(sums[worst] - 1.0) > SUM_TOLERANCE:
        raise ConfigError(
            f"column {worst} of {label}, which holds what peer {worst} sends and keeps, sums to {sums[worst]:.12g}",
            key="graph.weights",
            valid="columns that sum to 1 (to nine digits), so that mass is conserved",
        )
    kept = matrix.diagonal()
    if (kept <= 0).any():
        raise ConfigError(
            f"peer {int(np.argmax(kept <= 0))} keeps no part of its own model in {label}",
            key="graph.weights",
            value=float(kept.min()),
            valid="a positive weight on the diagonal",
        )


def sums_by_group(groups: npt.NDArray[np.integer[Any]], values: Float64Array, num_groups: int) -> Float64Array:
    """Return float64[num_groups]: the sum of the values of each group."""
    return np.bincount(groups, weights=values, minlength=num_groups).astype(np.float64)


def _sorted_by(major: IntArray, minor: IntArray, num_peers: int) -> IntArray:
    """Return the order that sorts positions by `major`, equal ones by `minor`."""
    # numpy sorts 16-bit numbers by radix, which is ten times as fast for a million edges.
    narrow = np.uint16 if num_peers <= 1 << 16 else np.int64
    by_minor = np.argsort(minor.astype(narrow), kind="stable")
    order: IntArray = by_minor[np.argsort(major[by_minor].astype(narrow), kind="stable")]
    return order
