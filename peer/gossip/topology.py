"""The schedule in which mixing matrices take turns, and how a graph gets its weights.

`build_schedule` and `Schedule.from_matrices` refuse matrices that break the convention of `mixing_matrix`, so that
users of a `Schedule` need not check again. A schedule is immutable and shared by all peers of a process. Its properties
are computed on demand, then kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from peer.errors import ConfigError
from peer.gossip import graphs, spectrum
from peer.gossip.graphs import Graph, GraphFile, GraphRequest
from peer.gossip.mixing_matrix import (
    SYMMETRY_TOLERANCE,
    Float64Array,
    MixingMatrix,
    check_matrix,
    mean_matrix,
    sums_by_group,
)

WEIGHT_RULES = ("auto", "uniform", "metropolis", "explicit")


class Turns:
    """Mixing matrices, and the rounds in which each is used. A `gossip.base.MixingSchedule`."""

    def __init__(self, matrices: Sequence[MixingMatrix], period_rounds: int = 1) -> None:
        """Let the matrices take turns, each for `period_rounds` rounds, whatever they hold."""
        self.num_peers = self.num_first = matrices[0].num_peers
        self.matrices, self.period_rounds = tuple(matrices), period_rounds
        self._all_senders: dict[int, tuple[int, ...]] = {}
        self._all_receivers: dict[int, tuple[int, ...]] = {}

    def members(self, t: int) -> tuple[int, ...]:
        """Return the members of round t, ascending: all peers."""
        return tuple(range(self.num_peers))

    def index(self, t: int) -> int:
        """Return which of the matrices round t uses."""
        return (t // self.period_rounds) % len(self.matrices)

    def at(self, t: int) -> MixingMatrix:
        """Return the matrix of round t."""
        return self.matrices[(t // self.period_rounds) % len(self.matrices)]

    def weight(self, t: int, receiver: int, sender: int) -> float:
        """Return W[receiver, sender] of round t."""
        return self.at(t).weight(receiver, sender)

    def senders(self, t: int, peer: int) -> tuple[int, ...]:
        """Return the senders to `peer` in round t, itself left out, ascending."""
        return self.at(t).senders(peer)

    def receivers(self, t: int, peer: int) -> tuple[int, ...]:
        """Return the receivers of `peer` in round t, itself left out, ascending."""
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


class Schedule(Turns):
    """The matrices of a run and the rounds in which each is used."""

    def __init__(self, matrices: Sequence[MixingMatrix], period_rounds: int = 1, name: str = "explicit") -> None:
        """Let the matrices take turns, each for `period_rounds` rounds. Raises ConfigError for one that may not be
        used: columns that do not sum to 1, negative or non-finite weights, a peer that keeps nothing."""
        if not matrices:
            raise ConfigError("a schedule needs at least one matrix", key="graph.kind")
        if period_rounds < 1:
            raise ConfigError("is out of range", key="graph.period", value=period_rounds, valid="1 or more rounds")
        for number, matrix in enumerate(matrices):
            if matrix.num_peers != matrices[0].num_peers:
                raise ConfigError("the matrices of a schedule differ in size", key="graph.kind")
            check_matrix(matrix, f"matrix {number}" if len(matrices) > 1 else "the matrix")
        super().__init__(matrices, period_rounds)
        self.name = name
        """The configured kind of graph, for display."""

    @classmethod
    def from_matrices(
        cls, mixing: Sequence[Sequence[Sequence[float]]] | Sequence[Float64Array], period_rounds: int = 1
    ) -> Schedule:
        """Return the schedule of dense matrices, to the last bit. Raises ConfigError."""
        dense = [np.array(w, dtype=np.float64) for w in mixing]
        for number, w in enumerate(dense):
            if w.ndim != 2 or w.shape[0] != w.shape[1] or w.shape[0] == 0:
                raise ConfigError(f"matrix {number} has shape {w.shape}, which is not square", key="graph.file")
        return cls([MixingMatrix.from_dense(w) for w in dense], period_rounds)

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
    def is_strongly_connected(self) -> bool:
        """Whether the union over the cycle is strongly connected, as convergence requires."""
        return self._union.is_strongly_connected

    @cached_property
    def diameter(self) -> int | None:
        """The largest number of hops between two peers in the union over the cycle, or a bound of it
        (`diameter_is_exact`); None if some cannot be reached."""
        return self._diameter[0] if self._diameter is not None else None

    @property
    def diameter_is_exact(self) -> bool:
        """Whether there are two peers as far apart as `diameter`; if not, no two are further apart."""
        return self._diameter is None or self._diameter[1]

    @cached_property
    def _diameter(self) -> tuple[int, bool] | None:
        return self._union.diameter() if self.is_strongly_connected else None

    @cached_property
    def contraction(self) -> spectrum.Contraction:
        """ρ, the factor by which one round shrinks disagreement in the long run, and how it was found: the second
        largest |eigenvalue| of W; where graphs take turns, of the product over one cycle, per round (geometric
        mean)."""
        return spectrum.contraction(self.matrices, self.period_rounds if self.is_time_varying else 1)

    @property
    def second_eigenvalue(self) -> float:
        """ρ of `contraction`."""
        return self.contraction.rho

    @property
    def spectral_gap(self) -> float:
        """1 − ρ: 1 averages exactly in one round, 0 never agrees."""
        return 1.0 - self.second_eigenvalue

    def smallest_slack_eigenvalue(self, averaging_rate: float = 1.0) -> float:
        """Return λ_min(W̄) of W̄ = ηW + (1 − η)I, the least over the matrices. Raises ValueError if one is asymmetric."""
        return averaging_rate * self._smallest_eigenvalue + 1.0 - averaging_rate

    @cached_property
    def _smallest_eigenvalue(self) -> float:
        return min(map(spectrum.smallest_eigenvalue, self.matrices))

    @cached_property
    def _union(self) -> MixingMatrix:
        """The mean of the matrices: an edge wherever one of them has it."""
        return mean_matrix(self.matrices) if self.is_time_varying else self.matrices[0]


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
    for a directed one. If only columns have to sum to 1 (`doubly` False: push-sum), "auto" is uniform on undirected
    graphs too: irregular ones mix faster (star of 8: gap 0.5 instead of 0.125).

    Raises ConfigError with the key, the value and the valid ones.
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
    """Return the graph with weights by the rule uniform, metropolis or explicit. Raises ConfigError if graph and rule
    do not fit."""
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
        given_away = sums_by_group(graph.senders, edge_weights, graph.num_peers)
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
