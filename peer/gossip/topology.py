"""Mixing matrices, the schedule in which they take turns, and what the theory wants to know of them.

Convention: `W[i, j]` is the weight receiver i gives to what sender j sends. Every column sums to 1 (a sender splits
its mass and nothing else), every diagonal entry is positive (self-loop), no entry is negative. `build_schedule` and
`Schedule.from_matrices` refuse everything else, so that whoever holds a `Schedule` need not check again.

Matrices are stored sparsely, by column and by row; a ring of 10,000 peers takes a megabyte. The properties are
computed when they are asked for, then kept. A schedule is immutable and shared by all peers of a process.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from peer.errors import ConfigError
from peer.gossip import graphs
from peer.gossip.graphs import Graph, GraphFile, GraphRequest

IntArray: TypeAlias = npt.NDArray[np.int64]
Float64Array: TypeAlias = npt.NDArray[np.float64]

SUM_TOLERANCE = 1e-9
"""How far a column (or row) may sum from 1. Rounding of 10,000 weights stays below 1e-12; a file that prints its
weights with fewer than nine digits is refused, since what a column lacks would be lost in every round."""

SYMMETRY_TOLERANCE = 1e-12
"""How far W[i, j] and W[j, i] of a symmetric matrix may differ."""

ZERO_EIGENVALUE = 1e-12
"""Eigenvalues below this are rounding errors of 0 (exact averaging, as after one cycle of exponential-one-peer)."""

D2_LEAST_EIGENVALUE = -1.0 / 3.0 + 1e-6
"""D² needs λ_min(W̄) above this. The margin is for uniform even rings: theirs is −1/3 exactly, which floating point
shows as −0.33333333333333315."""

DENSE_LIMIT = 1024
"""Up to this many peers eigenvalues come from the dense matrix; above it from an Arnoldi iteration, whose ρ is a lower
bound that is accurate to a few digits (circulant graphs, such as rings, are exact at any size)."""

KRYLOV_DIMENSION = 160
"""Size of that iteration's subspace."""

KRYLOV_ROUNDS = 64
"""Most rounds of a cycle that one step of that iteration multiplies out."""

CACHED_DENSE_PEERS = 2048
"""Up to this many peers `matrix` keeps the dense matrix that it built."""

WEIGHT_RULES = ("auto", "uniform", "metropolis", "explicit")


class MixingMatrix:
    """One matrix W, stored sparsely. Immutable; does not check itself (`Schedule` does)."""

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
        self._senders: dict[int, tuple[int, ...]] = {}
        self._receivers: dict[int, tuple[int, ...]] = {}

    @classmethod
    def from_dense(cls, w: Float64Array) -> MixingMatrix:
        """Return the matrix of `w: float64[n, n]`, its numbers unchanged."""
        receivers, senders = np.nonzero(w)
        return cls(w.shape[0], senders, receivers, w[receivers, senders])

    @property
    def num_edges(self) -> int:
        """Entries off the diagonal: messages of one round."""
        return int((self.column_receivers != self._column_senders).sum())

    @cached_property
    def _column_senders(self) -> IntArray:
        """The sender of each entry, in the order of the columns."""
        return np.repeat(np.arange(self.num_peers), np.diff(self.column_starts))

    @cached_property
    def _row_receivers(self) -> IntArray:
        return np.repeat(np.arange(self.num_peers), np.diff(self.row_starts))

    def column(self, sender: int) -> tuple[IntArray, Float64Array]:
        """Return who gets what `sender` splits, itself included: receivers ascending, and W[receivers, sender]."""
        part = slice(self.column_starts[sender], self.column_starts[sender + 1])
        return self.column_receivers[part], self.column_weights[part]

    def row(self, receiver: int) -> tuple[IntArray, Float64Array]:
        """Return whom `receiver` hears, itself included: senders ascending, and W[receiver, senders]."""
        part = slice(self.row_starts[receiver], self.row_starts[receiver + 1])
        return self.row_senders[part], self.row_weights[part]

    def weight(self, receiver: int, sender: int) -> float:
        """Return W[receiver, sender], 0 where there is no edge."""
        senders, weights = self.row(receiver)
        place = int(np.searchsorted(senders, sender))
        return float(weights[place]) if place < senders.size and senders[place] == sender else 0.0

    def senders(self, peer: int) -> tuple[int, ...]:
        """Return whom `peer` hears, itself left out, ascending."""
        if peer not in self._senders:
            self._senders[peer] = tuple(j for j in self.row(peer)[0].tolist() if j != peer)
        return self._senders[peer]

    def receivers(self, peer: int) -> tuple[int, ...]:
        """Return who hears `peer`, itself left out, ascending."""
        if peer not in self._receivers:
            self._receivers[peer] = tuple(i for i in self.column(peer)[0].tolist() if i != peer)
        return self._receivers[peer]

    def dense(self) -> Float64Array:
        """Return a new float64[n, n]."""
        w = np.zeros((self.num_peers, self.num_peers))
        w[self.column_receivers, self._column_senders] = self.column_weights
        return w

    def apply(self, v: Float64Array) -> Float64Array:
        """Return W v. `v: float64[n]`."""
        terms = self.row_weights * v[self.row_senders]
        return _sums(self._row_receivers, terms, self.num_peers)

    def column_sums(self) -> Float64Array:
        """Return float64[n]: 1ᵀW."""
        return _sums(self._column_senders, self.column_weights, self.num_peers)

    def row_sums(self) -> Float64Array:
        """Return float64[n]: W1."""
        return self.apply(np.ones(self.num_peers))

    def diagonal(self) -> Float64Array:
        """Return float64[n]: the weight each peer keeps."""
        kept = np.zeros(self.num_peers)
        own = self.column_receivers == self._column_senders
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
    def is_strongly_connected(self) -> bool:
        """Whether there is a directed path from every peer to every other."""
        return graphs.is_strongly_connected(self.num_peers, self._column_senders, self.column_receivers)

    @cached_property
    def circulant(self) -> Float64Array | None:
        """The first column, float64[n], where all columns are that one shifted (rings, exponential, complete)."""
        counts = np.diff(self.column_starts)
        if (counts != counts[0]).any():
            return None
        shape = (self.num_peers, int(counts[0]))
        offsets = (self.column_receivers - self._column_senders).reshape(shape) % self.num_peers
        order = np.argsort(offsets, axis=1)
        offsets = np.take_along_axis(offsets, order, axis=1)
        weights = np.take_along_axis(self.column_weights.reshape(shape), order, axis=1)
        if (offsets != offsets[0]).any() or (weights != weights[0]).any():
            return None
        first = np.zeros(self.num_peers)
        first[offsets[0]] = weights[0]
        return first

    @cached_property
    def smallest_eigenvalue(self) -> float:
        """λ_min of a symmetric W. Raises ValueError for another."""
        if not self.is_symmetric:
            raise ValueError("only a symmetric matrix has an ordered spectrum")
        if self.circulant is not None:
            return float(np.fft.fft(self.circulant).real.min())
        if self.num_peers <= DENSE_LIMIT:
            return float(np.linalg.eigvalsh(self.dense())[0])
        return float(_ritz_values([self]).real.min())


class Schedule:
    """The matrices of a run and the rounds in which each is used. Implements `gossip.base.MixingSchedule`."""

    def __init__(self, matrices: Sequence[MixingMatrix], period_rounds: int = 1, name: str = "explicit") -> None:
        """Let the matrices take turns, each for `period_rounds` rounds. Raises ConfigError for one that may not be
        used: columns that do not sum to 1, negative or non-finite weights, a peer that keeps nothing."""
        if not matrices:
            raise ConfigError("a schedule needs at least one matrix", key="graph.kind")
        if period_rounds < 1:
            raise ConfigError("is out of range", key="graph.period", value=period_rounds, valid="1 or more rounds")
        self.num_peers = matrices[0].num_peers
        for number, matrix in enumerate(matrices):
            if matrix.num_peers != self.num_peers:
                raise ConfigError("the matrices of a schedule differ in size", key="graph.kind")
            _check_matrix(matrix, f"matrix {number}" if len(matrices) > 1 else "the matrix")
        self.matrices = tuple(matrices)
        self.period_rounds = period_rounds
        self.name = name
        """How the graph was asked for, for people."""
        self._dense: dict[int, Float64Array] = {}
        self._all_senders: dict[int, tuple[int, ...]] = {}
        self._all_receivers: dict[int, tuple[int, ...]] = {}

    @classmethod
    def from_matrices(
        cls, mixing: Sequence[Sequence[Sequence[float]]] | Sequence[Float64Array], period_rounds: int = 1
    ) -> Schedule:
        """Return the schedule of dense matrices (a scenario's `mixing`), to the last bit. Raises ConfigError."""
        dense = [np.array(w, dtype=np.float64) for w in mixing]
        for number, w in enumerate(dense):
            if w.ndim != 2 or w.shape[0] != w.shape[1] or w.shape[0] == 0:
                raise ConfigError(f"matrix {number} has shape {w.shape}, which is not square", key="graph.file")
        return cls([MixingMatrix.from_dense(w) for w in dense], period_rounds)

    def index(self, t: int) -> int:
        """Return which of the matrices round t uses."""
        return (t // self.period_rounds) % len(self.matrices)

    def at(self, t: int) -> MixingMatrix:
        """Return the matrix of round t."""
        return self.matrices[(t // self.period_rounds) % len(self.matrices)]

    def matrix(self, t: int) -> Float64Array:
        """Return W of round t, float64[n, n], which the caller must not write to. Dense: for thousands of peers use
        `column`, `row` or `weight`."""
        index = self.index(t)
        if index not in self._dense:
            w = self.matrices[index].dense()
            w.flags.writeable = False
            if self.num_peers > CACHED_DENSE_PEERS:
                return w
            self._dense[index] = w
        return self._dense[index]

    def column(self, t: int, sender: int) -> tuple[IntArray, Float64Array]:
        """Return the receivers of `sender` in round t, itself included, ascending, and their weights."""
        return self.at(t).column(sender)

    def row(self, t: int, receiver: int) -> tuple[IntArray, Float64Array]:
        """Return whom `receiver` hears in round t, itself included, ascending, and the weights it gives them."""
        return self.at(t).row(receiver)

    def weight(self, t: int, receiver: int, sender: int) -> float:
        """Return W[receiver, sender] of round t."""
        return self.at(t).weight(receiver, sender)

    def senders(self, t: int, peer: int) -> tuple[int, ...]:
        """Return whom `peer` hears in round t, itself left out, ascending."""
        return self.at(t).senders(peer)

    def receivers(self, t: int, peer: int) -> tuple[int, ...]:
        """Return who hears `peer` in round t, itself left out, ascending."""
        return self.at(t).receivers(peer)

    def all_senders(self, peer: int) -> tuple[int, ...]:
        """Return the union of `senders` over the whole schedule, ascending."""
        if peer not in self._all_senders:
            self._all_senders[peer] = tuple(sorted(set().union(*(m.senders(peer) for m in self.matrices))))
        return self._all_senders[peer]

    def all_receivers(self, peer: int) -> tuple[int, ...]:
        """Return the union of `receivers` over the whole schedule, ascending."""
        if peer not in self._all_receivers:
            self._all_receivers[peer] = tuple(sorted(set().union(*(m.receivers(peer) for m in self.matrices))))
        return self._all_receivers[peer]

    @property
    def is_time_varying(self) -> bool:
        return len(self.matrices) > 1

    @property
    def cycle_rounds(self) -> int:
        """Rounds after which the schedule repeats."""
        return len(self.matrices) * self.period_rounds if self.is_time_varying else 1

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 over all weights and turns; peers of one run must have the same (part of the hello)."""
        period = self.period_rounds if self.is_time_varying else 1
        hasher = hashlib.sha256(b"sottovoce mixing schedule 1\n")
        hasher.update(np.array([self.num_peers, len(self.matrices), period], dtype="<i8").tobytes())
        for matrix in self.matrices:
            hasher.update(matrix.column_starts.astype("<i8").tobytes())
            hasher.update(matrix.column_receivers.astype("<i8").tobytes())
            hasher.update(matrix.column_weights.astype("<f8").tobytes())
        return hasher.hexdigest()

    @property
    def messages_per_round(self) -> float:
        """Messages of all peers in one round, mean over the cycle."""
        return sum(matrix.num_edges for matrix in self.matrices) / len(self.matrices)

    @property
    def replica_messages_per_round(self) -> int:
        """Messages of all peers in one round where replicas must reach every receiver of the whole schedule."""
        return self._union.num_edges

    @property
    def is_column_stochastic(self) -> bool:
        """Whether every column of every matrix sums to 1: true of every schedule that could be built."""
        return all(bool((np.abs(m.column_sums() - 1.0) <= SUM_TOLERANCE).all()) for m in self.matrices)

    @cached_property
    def is_doubly_stochastic(self) -> bool:
        """Whether rows sum to 1 too, in every matrix."""
        return all(matrix.is_doubly_stochastic for matrix in self.matrices)

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether W = Wᵀ for every matrix."""
        return all(matrix.is_symmetric for matrix in self.matrices)

    @cached_property
    def is_complete(self) -> bool:
        """Whether every peer hears every other in every round."""
        return all(matrix.num_edges == self.num_peers * (self.num_peers - 1) for matrix in self.matrices)

    @cached_property
    def is_each_strongly_connected(self) -> bool:
        """Whether every single matrix connects everybody with everybody."""
        return all(matrix.is_strongly_connected for matrix in self.matrices)

    @cached_property
    def is_strongly_connected(self) -> bool:
        """Whether the union over the cycle does: what convergence needs."""
        return self._union.is_strongly_connected

    @cached_property
    def diameter(self) -> int | None:
        """The largest number of hops between two peers in the union over the cycle; None if some cannot be reached."""
        if not self.is_strongly_connected:
            return None
        union = self._union
        senders, receivers = union._column_senders, union.column_receivers
        if union.circulant is not None:
            return int(graphs.distances(self.num_peers, senders, receivers, 0).max())
        return _diameter(union)

    @cached_property
    def second_eigenvalue(self) -> float:
        """ρ, the factor by which one round shrinks disagreement in the long run: the second largest |eigenvalue| of W;
        where graphs take turns, of the product over one cycle, per round (geometric mean)."""
        if self.num_peers == 1:
            return 0.0
        circulants = [matrix.circulant for matrix in self.matrices]
        if all(first is not None for first in circulants):
            return self._circulant_rho([first for first in circulants if first is not None])
        if self.num_peers <= DENSE_LIMIT:
            return self._dense_rho()
        turns = min(self.period_rounds, max(1, KRYLOV_ROUNDS // len(self.matrices))) if self.is_time_varying else 1
        cycle = [matrix for matrix in self.matrices for _ in range(turns)]
        return _per_round(_log(float(np.abs(_ritz_values(cycle)).max())), len(cycle))

    @property
    def spectral_gap(self) -> float:
        """1 − ρ: 1 averages exactly in one round, 0 never agrees."""
        return 1.0 - self.second_eigenvalue

    def smallest_slack_eigenvalue(self, averaging_rate: float = 1.0) -> float:
        """Return λ_min(W̄) of W̄ = ηW + (1 − η)I, the least over the matrices. Raises ValueError if one is asymmetric."""
        return averaging_rate * min(m.smallest_eigenvalue for m in self.matrices) + 1.0 - averaging_rate

    @cached_property
    def _union(self) -> MixingMatrix:
        """The mean of the matrices: an edge wherever one of them has it."""
        if not self.is_time_varying:
            return self.matrices[0]
        code = np.concatenate([m._column_senders * self.num_peers + m.column_receivers for m in self.matrices])
        weights = np.concatenate([m.column_weights for m in self.matrices]) / len(self.matrices)
        codes, place = np.unique(code, return_inverse=True)
        senders, receivers = np.divmod(codes, self.num_peers)
        return MixingMatrix(self.num_peers, senders, receivers, _sums(place, weights, codes.size))

    def _circulant_rho(self, circulants: Sequence[Float64Array]) -> float:
        # Circulant matrices share their eigenvectors, so the eigenvalues of the product are products; the first one is
        # that of the mean.
        logs = np.zeros(self.num_peers - 1)
        for first in circulants:
            magnitude = np.abs(np.fft.fft(first)[1:])
            logs += np.array([_log(value) for value in magnitude.tolist()])
        return _per_round(float(logs.max()), len(circulants))

    def _dense_rho(self) -> float:
        # 1ᵀW = 1ᵀ, so W maps the vectors of sum 0 to themselves, and W − (1/n)11ᵀ has W's eigenvalues there and 0
        # beside them. Products keep that form. The norm is taken out after each factor: a period of thousands of
        # rounds underflows otherwise.
        mean = np.full((self.num_peers, self.num_peers), 1.0 / self.num_peers)
        product, log_scale = np.eye(self.num_peers), 0.0
        turns = self.period_rounds if self.is_time_varying else 1
        for matrix in self.matrices:
            power, log_power = _scaled_power(matrix.dense() - mean, turns)
            product, log_norm = _scaled(power @ product)
            log_scale += log_power + log_norm
        if self.is_symmetric and not self.is_time_varying:
            largest = float(np.abs(np.linalg.eigvalsh(product)).max())
        else:
            largest = float(np.abs(np.linalg.eigvals(product)).max())
        return _per_round(_log(largest) + log_scale, self.cycle_rounds)


def build_schedule(
    num_peers: int,
    kinds: Sequence[str] | str,
    *,
    weights: str = "auto",
    period_rounds: int = 1,
    degree: int = 3,
    probability: float = 0.4,
    seed: int = 0,
    file: GraphFile | None = None,
    doubly: bool = True,
) -> Schedule:
    """Return the schedule in which the graphs of `kinds` take turns, each for `period_rounds` rounds.

    `weights`: "uniform" splits 1/(out-degree + 1) to each receiver and oneself (column stochastic); "metropolis" gives
    each edge 1/(1 + max degree of its ends) (doubly stochastic, undirected graphs only); "explicit" takes those that
    the graph brings; "auto" takes those too where there are any, else metropolis for an undirected graph and uniform
    for a directed one. Where columns are all that has to sum to 1 (`doubly` False: push-sum), "auto" is uniform on
    undirected graphs too: irregular ones mix faster (star of 8: gap 0.5 instead of 0.125).

    Raises ConfigError with the key, the value and what would be valid.
    """
    names = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if not names:
        raise ConfigError(
            "is an empty list; name at least one graph", key="graph.kind", valid=", ".join(graphs.FAMILIES)
        )
    if weights not in WEIGHT_RULES:
        raise ConfigError(
            "is not one of the choices", key="graph.weights", value=weights, valid=", ".join(WEIGHT_RULES)
        )
    request = GraphRequest(num_peers=num_peers, degree=degree, probability=probability, seed=seed, file=file)
    built = [(name, graph) for name in names for graph in graphs.build_graphs(name, request)]
    matrices = [weigh(graph, _rule(graph, weights, doubly=doubly), name) for name, graph in built]
    return Schedule(matrices, period_rounds, ", ".join(names))


def _rule(graph: Graph, weights: str, *, doubly: bool) -> str:
    if weights != "auto":
        return weights
    if graph.weights is not None:
        return "explicit"
    return "metropolis" if doubly and graph.is_undirected else "uniform"


def weigh(graph: Graph, weights: str, name: str = "explicit") -> MixingMatrix:
    """Return the graph with weights by the rule uniform, metropolis or explicit. Raises ConfigError where graph and
    rule do not fit."""
    degrees = graph.out_degrees()
    if weights == "explicit":
        if graph.weights is None or graph.self_weights is None:
            raise ConfigError(
                f"the graph {name} does not define weights",
                key="graph.weights",
                value="explicit",
                valid="auto, uniform, metropolis, or kind = file with weights",
            )
        edge_weights, self_weights = graph.weights, graph.self_weights
    elif weights == "uniform":
        self_weights = (1.0 / (degrees + 1.0)).astype(np.float64)
        edge_weights = self_weights[graph.senders]
    else:
        if not graph.is_undirected:
            raise ConfigError(
                f"Metropolis weights need edges in both directions, and {name} is directed",
                key="graph.weights",
                value="metropolis",
                valid="uniform, or an undirected graph such as ring",
            )
        larger = np.maximum(degrees[graph.senders], degrees[graph.receivers])
        edge_weights = (1.0 / (1.0 + larger)).astype(np.float64)
        given_away = _sums(graph.senders, edge_weights, graph.num_peers)
        rest, even = 1.0 - given_away, 1.0 / (degrees + 1.0)
        # On a regular graph this is the uniform rule, and has to be so to the last bit (digest, circulant).
        self_weights = np.where(np.abs(rest - even) < SYMMETRY_TOLERANCE, even, rest)
    peers = np.arange(graph.num_peers)
    # An edge of weight 0 is no edge: nothing travels on it.
    real = edge_weights != 0.0
    return MixingMatrix(
        graph.num_peers,
        np.concatenate([graph.senders[real], peers]),
        np.concatenate([graph.receivers[real], peers]),
        np.concatenate([edge_weights[real], self_weights]),
    )


def _check_matrix(matrix: MixingMatrix, label: str) -> None:
    if not np.isfinite(matrix.column_weights).all():
        raise ConfigError(f"{label} has a weight that is not a finite number", key="graph.weights")
    if (matrix.column_weights < 0).any():
        place = int(np.argmax(matrix.column_weights < 0))
        sender, receiver = int(matrix._column_senders[place]), int(matrix.column_receivers[place])
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


def _sorted_by(major: IntArray, minor: IntArray, num_peers: int) -> IntArray:
    """Return the order that sorts positions by `major`, equal ones by `minor`."""
    # numpy sorts 16-bit numbers by radix, which is ten times as fast for a million edges.
    narrow = np.uint16 if num_peers <= 1 << 16 else np.int64
    by_minor = np.argsort(minor.astype(narrow), kind="stable")
    order: IntArray = by_minor[np.argsort(major[by_minor].astype(narrow), kind="stable")]
    return order


def _sums(groups: npt.NDArray[np.integer[Any]], values: Float64Array, num_groups: int) -> Float64Array:
    """Return float64[num_groups]: the sum of the values of each group."""
    return np.bincount(groups, weights=values, minlength=num_groups).astype(np.float64)


def _scaled(matrix: Float64Array) -> tuple[Float64Array, float]:
    """Return the matrix divided by its norm, and the norm's logarithm; zeros for what is only rounding errors."""
    norm = float(np.linalg.norm(matrix))
    if norm < ZERO_EIGENVALUE:
        return np.zeros_like(matrix), 0.0
    return matrix / norm, math.log(norm)


def _scaled_power(matrix: Float64Array, exponent: int) -> tuple[Float64Array, float]:
    """Return (P, s) with matrix ** exponent = exp(s) P and ‖P‖ about 1. By squaring."""
    base, log_base = _scaled(matrix)
    result, log_result = np.eye(matrix.shape[0]), 0.0
    while exponent:
        if exponent & 1:
            result, log_norm = _scaled(base @ result)
            log_result += log_base + log_norm
        exponent >>= 1
        if exponent:
            base, log_norm = _scaled(base @ base)
            log_base = 2 * log_base + log_norm
    return result, log_result


def _log(magnitude: float) -> float:
    return math.log(magnitude) if magnitude >= ZERO_EIGENVALUE else -math.inf


def _per_round(log_rho: float, rounds: int) -> float:
    """Return the factor of one round of a product over `rounds`; above 1 there are only rounding errors."""
    return min(math.exp(log_rho / rounds), 1.0)


def _ritz_values(cycle: Sequence[MixingMatrix]) -> npt.NDArray[np.complex128]:
    """Return approximate eigenvalues of the product of the matrices on vectors of sum 0 (Arnoldi's iteration with full
    reorthogonalization; the outermost eigenvalues converge first)."""
    n = cycle[0].num_peers
    steps = min(KRYLOV_DIMENSION, n - 1)
    basis = np.zeros((steps + 1, n))
    projected = np.zeros((steps + 1, steps))
    # Any start that is not special to one graph will do, and it must be the same on every device.
    start = np.sin(np.arange(n) ** 2 * 0.5 + 1.0)
    start -= start.mean()
    basis[0] = start / np.linalg.norm(start)
    for step in range(steps):
        v = basis[step]
        for matrix in cycle:
            v = matrix.apply(v)
        v = v - v.mean()
        for _ in range(2):
            overlap = basis[: step + 1] @ v
            v = v - overlap @ basis[: step + 1]
            projected[: step + 1, step] += overlap
        norm = float(np.linalg.norm(v))
        if norm < ZERO_EIGENVALUE:
            steps = step + 1
            break
        projected[step + 1, step] = norm
        basis[step + 1] = v / norm
    values: npt.NDArray[np.complex128] = np.linalg.eigvals(projected[:steps, :steps]).astype(np.complex128)
    return values


def _diameter(matrix: MixingMatrix) -> int:
    """Return the largest number of hops between two peers of a strongly connected graph.

    All sources at once, one bit each: `reached[i]` is the set of peers that i has heard of, and one hop is a union over
    the row of i.
    """
    n = matrix.num_peers
    words = (n + 63) // 64
    reached = np.zeros((n, words), dtype=np.uint64)
    peers = np.arange(n)
    reached[peers, peers // 64] = np.uint64(1) << (peers % 64).astype(np.uint64)
    full = np.bitwise_or.reduce(reached, axis=0)
    for hops in itertools.count():
        if (reached == full).all():
            return hops
        reached = np.bitwise_or.reduceat(reached[matrix.row_senders], matrix.row_starts[:-1], axis=0)
    raise AssertionError("a strongly connected graph has a diameter")
