"""The graph families, by name in one table: the edges along which peers send.

A `Graph` lists directed edges j → i (j sends, i receives) without the self-loops, which every peer has. A family
returns one graph, or several that take turns round by round. Weights are the business of `topology`; only families
that stand for published or user-given matrices bring their own.

Random graphs are functions of their seed (`peer.random`), so that all devices of a run draw the same graph alone.
Nothing here opens a file: the text of `graph.file` is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from peer.errors import ConfigError
from peer.foreign_values import parse_json, parse_toml
from peer.random import SHARED, Purpose, Stream, stream

IntArray: TypeAlias = npt.NDArray[np.int64]
Float64Array: TypeAlias = npt.NDArray[np.float64]

MAX_EDGES = 1 << 22
"""More edges than this are refused before they are built (4.2 million: a complete graph of 2,048 peers)."""

MAX_REDRAWS = 200
"""Random graphs drawn in search of a strongly connected one before the settings are refused."""


@dataclass(frozen=True, eq=False)
class Graph:
    """Directed edges without self-loops, sorted by (sender, receiver), each at most once."""

    num_peers: int
    senders: IntArray
    """int64[m]: j of the edge j → i."""
    receivers: IntArray
    """int64[m]: i of the edge j → i."""
    weights: Float64Array | None = None
    """float64[m]: W[i, j], for graphs that bring their own weights."""
    self_weights: Float64Array | None = None
    """float64[n]: W[j, j]; None: the remainder of each column."""

    @property
    def is_undirected(self) -> bool:
        """Whether every edge has its reverse."""
        forth = self.senders * self.num_peers + self.receivers
        back = np.sort(self.receivers * self.num_peers + self.senders)
        return bool(np.array_equal(forth, back))

    def out_degrees(self) -> IntArray:
        """Return int64[n]: the number of receivers of each peer."""
        return np.bincount(self.senders, minlength=self.num_peers).astype(np.int64)


@dataclass(frozen=True)
class GraphFile:
    """The content of a user's graph file, read by the caller."""

    name: str
    """Shown in errors; ".toml" at its end selects TOML, anything else is JSON."""
    text: str


@dataclass(frozen=True, kw_only=True)
class GraphRequest:
    """Settings from which a family builds."""

    num_peers: int
    degree: int = 3
    probability: float = 0.4
    seed: int = 0
    file: GraphFile | None = None


@dataclass(frozen=True)
class GraphFamily:
    """One row of the table of families."""

    name: str
    summary: str
    """One sentence for `sotto lab list graphs`."""
    build: Callable[[GraphRequest], tuple[Graph, ...]]
    """Return the graphs that take turns; raises ConfigError for a request that has no such graph."""


def build_graphs(kind: str, request: GraphRequest) -> tuple[Graph, ...]:
    """Return the graphs of one family, in their turn. Raises ConfigError for an unknown name or an impossible size."""
    if request.num_peers < 1:
        raise ConfigError("a run needs at least one peer", key="peers", value=request.num_peers, valid="1 or more")
    family = FAMILIES.get(kind)
    if family is None:
        raise ConfigError("unknown graph", key="graph.kind", value=kind, valid=", ".join(FAMILIES))
    if not 0 <= request.seed < 1 << 63:
        raise ConfigError("is out of range", key="graph.seed", value=request.seed, valid="0 to 2^63 − 1")
    return family.build(request)


def _directed_ring(request: GraphRequest) -> tuple[Graph, ...]:
    return (_circulant(request.num_peers, [1]),)


def _ring(request: GraphRequest) -> tuple[Graph, ...]:
    return (_circulant(request.num_peers, [1, -1]),)


def _line(request: GraphRequest) -> tuple[Graph, ...]:
    left = np.arange(request.num_peers - 1)
    return (_undirected(request.num_peers, left, left + 1),)


def _torus(request: GraphRequest) -> tuple[Graph, ...]:
    n = request.num_peers
    rows = _torus_rows(n)
    if rows == 0:
        why = f"{n} is prime" if n > 3 else f"{n} is too small"
        raise ConfigError(
            f"a torus needs a number of peers that is the product of two factors of at least 2, but {why}",
            key="graph.kind",
            value="torus",
            valid="4, 6, 8, 9, 10, 12, … peers, or kind = ring",
        )
    columns = n // rows
    row, column = np.divmod(np.arange(n), columns)
    right = row * columns + (column + 1) % columns
    down = (row + 1) % rows * columns + column
    both = np.concatenate([np.arange(n), np.arange(n)])
    return (_undirected(n, both, np.concatenate([right, down])),)


def _exponential(request: GraphRequest) -> tuple[Graph, ...]:
    return (_circulant(request.num_peers, _powers_of_two(request.num_peers)),)


def _exponential_one_peer(request: GraphRequest) -> tuple[Graph, ...]:
    n = request.num_peers
    return tuple(_circulant(n, [hop]) for hop in _powers_of_two(n)) or (_circulant(n, []),)


def _hypercube(request: GraphRequest) -> tuple[Graph, ...]:
    n = request.num_peers
    if n & (n - 1):
        below = 1 << (n.bit_length() - 1)
        raise ConfigError(
            f"a hypercube needs a number of peers that is a power of two, but there are {n}",
            key="graph.kind",
            value="hypercube",
            valid=f"{below} or {2 * below} peers, or kind = exponential",
        )
    peers = np.arange(n)
    flips = [peers ^ (1 << bit) for bit in range(n.bit_length() - 1)]
    return (_graph(n, np.tile(peers, len(flips)), np.concatenate(flips) if flips else peers[:0]),)


def _complete(request: GraphRequest) -> tuple[Graph, ...]:
    n = request.num_peers
    _refuse_too_many(n * (n - 1), "complete")
    return (_circulant(n, range(1, n)),)


def _star(request: GraphRequest) -> tuple[Graph, ...]:
    leaves = np.arange(1, request.num_peers)
    return (_undirected(request.num_peers, np.zeros_like(leaves), leaves),)


def _random_regular(request: GraphRequest) -> tuple[Graph, ...]:
    n, degree = request.num_peers, request.degree
    if not 0 < degree < n:
        valid = f"1 to {n - 1} for {n} peers" if n > 1 else "another graph: a single peer has no neighbours"
        raise ConfigError(
            "a peer cannot have more neighbours than there are other peers",
            key="graph.degree",
            value=degree,
            valid=valid,
        )
    if degree * n % 2:
        raise ConfigError(
            f"no graph of {n} peers has {degree} neighbours for each, since both numbers are odd",
            key="graph.degree",
            value=degree,
            valid=f"an even number, such as {degree + 1 if degree + 1 < n else degree - 1}, or an even number of peers",
        )
    if degree == 1 and n > 2:
        raise ConfigError(
            "with degree 1 the graph is a set of separate pairs", key="graph.degree", value=1, valid="2 or more"
        )
    _refuse_too_many(n * degree, "random-regular")
    return (
        _first_connected(lambda attempt: _switched_lattice(n, degree, request.seed, attempt), "graph.degree", degree),
    )


def _erdos_renyi(request: GraphRequest) -> tuple[Graph, ...]:
    return (_binomial(request, directed=False),)


def _directed_erdos_renyi(request: GraphRequest) -> tuple[Graph, ...]:
    return (_binomial(request, directed=True),)


def _four_node(which: str) -> Callable[[GraphRequest], tuple[Graph, ...]]:
    def build(request: GraphRequest) -> tuple[Graph, ...]:
        if request.num_peers != 4:
            raise ConfigError(
                f"the graphs of Sparse-Push's figure 4 have four nodes, but this run has {request.num_peers} peers",
                key="graph.kind",
                value="sparse-push-four" if len(which) > 1 else f"four-node-{which}",
                valid="4 peers, or another graph",
            )
        return tuple(_weighted_edges(4, SPARSE_PUSH_EDGES[name]) for name in which)

    return build


def _from_file(request: GraphRequest) -> tuple[Graph, ...]:
    if request.file is None:
        raise ConfigError("is missing: with kind = file, name a file with matrices or edges", key="graph.file")
    return parse_graph_file(request.file, request.num_peers)


SPARSE_PUSH_EDGES: Mapping[str, tuple[tuple[int, int, float], ...]] = {
    "a": ((0, 1, 1 / 2), (1, 2, 1 / 3), (2, 3, 1 / 2), (3, 0, 1 / 3)),
    "b": ((0, 3, 1 / 2), (1, 0, 1 / 3), (2, 1, 1 / 2), (3, 2, 1 / 3)),
    "c": ((0, 2, 1 / 2), (1, 3, 1 / 3), (2, 1, 1 / 2), (3, 0, 1 / 3)),
}
"""(sender, receiver, weight) of Sparse-Push, figures 4 and 5, at η = 1; a sender keeps the rest."""

FAMILIES: Mapping[str, GraphFamily] = {
    family.name: family
    for family in (
        GraphFamily("directed-ring", "Each peer sends to the next one.", _directed_ring),
        GraphFamily("ring", "Each peer exchanges with the previous and the next one.", _ring),
        GraphFamily("line", "A ring with one edge removed: the two ends have one neighbour.", _line),
        GraphFamily(
            "torus",
            "Peers on a grid, as square as their number allows, exchange with four neighbours; the edges wrap.",
            _torus,
        ),
        GraphFamily("exponential", "Each peer sends to the peers 1, 2, 4, 8, … positions ahead.", _exponential),
        GraphFamily(
            "exponential-one-peer",
            "Each peer sends to one other: 1 place ahead in the first round, then 2, 4, …, and again from 1.",
            _exponential_one_peer,
        ),
        GraphFamily(
            "hypercube",
            "Peers whose numbers differ in one bit exchange; the number of peers must be a power of two.",
            _hypercube,
        ),
        GraphFamily("complete", "Each peer exchanges with every other.", _complete),
        GraphFamily("star", "Peer 0 exchanges with all others.", _star),
        GraphFamily("random-regular", "Each peer exchanges with `degree` peers drawn at random.", _random_regular),
        GraphFamily(
            "erdos-renyi",
            "Each pair exchanges with probability `probability`; redrawn until connected.",
            _erdos_renyi,
        ),
        GraphFamily(
            "directed-erdos-renyi",
            "Each peer sends to each other peer with probability `probability`; redrawn until strongly connected.",
            _directed_erdos_renyi,
        ),
        GraphFamily("four-node-a", "Sparse-Push's directed ring of four, with its weights.", _four_node("a")),
        GraphFamily("four-node-b", "The same ring in the opposite direction.", _four_node("b")),
        GraphFamily("four-node-c", "Sparse-Push's third graph: the ring 0 → 2 → 1 → 3 → 0.", _four_node("c")),
        GraphFamily("sparse-push-four", "Sparse-Push's graphs (a), (b) and (c) in turn.", _four_node("abc")),
        GraphFamily("file", "Matrices or edges with weights from a JSON or TOML file.", _from_file),
    )
}


def parse_graph_file(file: GraphFile, num_peers: int) -> tuple[Graph, ...]:
    """Return the graphs that a file describes.

    The file holds one of these (JSON shown; TOML has the same keys):

        {"matrices": [[[0.5, 0.5], [0.5, 0.5]], …]}            W[i][j]: weight receiver i gives to sender j
        {"edges": [[0, 1, 0.5], [1, 0, 0.5]]}                  [sender, receiver, weight]; a sender keeps the rest
        {"edges": [[0, 1], [1, 0]]}                            without weights: `graph.weights` chooses them
        {"graphs": [{"edges": …}, {"edges": …}]}               several that take turns

    A bare JSON list is taken for `matrices`, and `mixing` is another name for it. Raises ConfigError for `graph.file`.
    """
    tree = _parse_text(file)
    if isinstance(tree, list):
        tree = {"matrices": tree}
    if not isinstance(tree, dict):
        raise _file_error(file, "should hold a table or a list of matrices")
    matrices = tree.get("matrices", tree.get("mixing"))
    if matrices is not None:
        if not isinstance(matrices, list) or not matrices:
            raise _file_error(file, "`matrices` must be a list of at least one matrix")
        return tuple(_from_matrix(file, number, rows, num_peers) for number, rows in enumerate(matrices))
    graphs = tree.get("graphs", [tree] if "edges" in tree else None)
    if not isinstance(graphs, list) or not graphs:
        raise _file_error(file, "contains none of `matrices`, `edges` and `graphs`")
    return tuple(_from_edges(file, number, graph, num_peers) for number, graph in enumerate(graphs))


def _parse_text(file: GraphFile) -> Any:
    kind = "TOML" if file.name.lower().endswith(".toml") else "JSON"
    try:
        if kind == "TOML":
            return parse_toml(file.text)
        return parse_json(file.text, most_bytes=len(file.text), infinite="kept")
    except ValueError as error:
        raise _file_error(file, f"is not valid {kind}: {error}") from None


def _from_matrix(file: GraphFile, number: int, rows: Any, num_peers: int) -> Graph:
    try:
        w = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError):
        raise _file_error(file, f"matrix {number} is not a square table of numbers") from None
    if w.shape != (num_peers, num_peers):
        raise _file_error(file, f"matrix {number} has shape {w.shape}, but the run has {num_peers} peers")
    return graph_of_matrix(w)


def graph_of_matrix(w: Float64Array) -> Graph:
    """Return the graph of a mixing matrix `w: float64[n, n]`, bringing its weights along unchanged."""
    senders, receivers = np.nonzero(w.T)
    off = senders != receivers
    senders, receivers = senders[off].astype(np.int64), receivers[off].astype(np.int64)
    return Graph(w.shape[0], senders, receivers, w[receivers, senders].copy(), w.diagonal().copy())


def _from_edges(file: GraphFile, number: int, graph: Any, num_peers: int) -> Graph:
    edges = graph.get("edges") if isinstance(graph, dict) else None
    if not isinstance(edges, list):
        raise _file_error(file, f"graph {number} has no list `edges`")
    rows = [_edge(file, number, edge, num_peers) for edge in edges]
    if len({row[:2] for row in rows}) != len(rows):
        raise _file_error(file, f"graph {number} lists an edge twice")
    weighted = [row for row in rows if row[2] is not None]
    if weighted and len(weighted) != len(rows):
        raise _file_error(
            file, f"graph {number} gives weights to only some of its edges; give all edges a weight, or none"
        )
    if not weighted:
        others = [row for row in rows if row[0] != row[1]]
        return _graph(num_peers, np.array([r[0] for r in others], np.int64), np.array([r[1] for r in others], np.int64))
    return _weighted_edges(num_peers, [(j, i, float(w)) for j, i, w in rows if w is not None])


def _edge(file: GraphFile, number: int, edge: Any, num_peers: int) -> tuple[int, int, float | None]:
    if isinstance(edge, dict):
        edge = [edge.get("from"), edge.get("to"), *([edge["weight"]] if "weight" in edge else [])]
    shaped = isinstance(edge, list) and len(edge) in (2, 3)
    if not shaped or not all(isinstance(end, int) and not isinstance(end, bool) for end in edge[:2]):
        raise _file_error(
            file, f"an edge of graph {number} is {edge!r}, not [sender, receiver] or [sender, receiver, weight]"
        )
    if not all(0 <= end < num_peers for end in edge[:2]):
        raise _file_error(
            file, f"the edge {edge!r} names a peer that does not exist; peers are numbered from 0 to {num_peers - 1}"
        )
    weight = edge[2] if len(edge) == 3 else None
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float)):
        raise _file_error(file, f"the weight of the edge {edge!r} is not a number")
    return edge[0], edge[1], weight


def _file_error(file: GraphFile, problem: str) -> ConfigError:
    return ConfigError(problem, key="graph.file", file=file.name)


def _graph(num_peers: int, senders: IntArray, receivers: IntArray) -> Graph:
    """Return the graph of these edges, sorted, without doubles and self-loops."""
    code = np.sort(senders.astype(np.int64) * num_peers + receivers)
    code = code[np.diff(code, prepend=-1) > 0]
    ordered_senders, ordered_receivers = np.divmod(code, num_peers)
    off = ordered_senders != ordered_receivers
    return Graph(num_peers, ordered_senders[off], ordered_receivers[off])


def _undirected(num_peers: int, one: IntArray, other: IntArray) -> Graph:
    return _graph(num_peers, np.concatenate([one, other]), np.concatenate([other, one]))


def _circulant(num_peers: int, hops: Iterable[int]) -> Graph:
    """Return the graph in which every peer sends to those `hops` places ahead."""
    offsets = np.array(list(hops), dtype=np.int64)
    senders = np.repeat(np.arange(num_peers), offsets.size)
    return _graph(num_peers, senders, (senders + np.tile(offsets, num_peers)) % num_peers)


def _weighted_edges(num_peers: int, edges: Sequence[tuple[int, int, float]]) -> Graph:
    """Return the graph of (sender, receiver, weight); a self-loop may be named, else the sender keeps the rest."""
    ordered = sorted(edge for edge in edges if edge[0] != edge[1])
    senders, receivers = (np.array([edge[end] for edge in ordered], dtype=np.int64) for end in (0, 1))
    weights = np.array([edge[2] for edge in ordered], dtype=np.float64)
    self_weights: Float64Array = 1.0 - np.bincount(senders, weights=weights, minlength=num_peers).astype(np.float64)
    for sender, receiver, weight in edges:
        if sender == receiver:
            self_weights[sender] = weight
    return Graph(num_peers, senders, receivers, weights, self_weights)


def _powers_of_two(below: int) -> list[int]:
    return [1 << k for k in range((below - 1).bit_length())]


def _refuse_too_many(edges: int, kind: str) -> None:
    if edges > MAX_EDGES:
        raise ConfigError(
            f"the graph would have {edges:,} edges; at most {MAX_EDGES:,} are allowed",
            key="graph.kind",
            value=kind,
            valid="a sparser graph, such as exponential",
        )


def _binomial(request: GraphRequest, *, directed: bool) -> Graph:
    n, probability = request.num_peers, request.probability
    if not 0 < probability <= 1:
        raise ConfigError(
            "must be a probability above 0", key="graph.probability", value=probability, valid="0 < p ≤ 1"
        )
    _refuse_too_many(int(probability * n * (n - 1)), "erdos-renyi")

    def draw(attempt: int) -> Graph:
        senders, receivers = [], []
        for peer in range(n):
            # Row by row: 10,000 peers are 10⁸ draws, too many to hold at once.
            first = 0 if directed else peer + 1
            uniforms = _stream(request.seed, attempt, peer).uniforms(n - first, np.float64)
            hit = np.flatnonzero(uniforms < probability) + first
            senders.append(np.full(hit.size, peer, dtype=np.int64))
            receivers.append(hit)
        build = _graph if directed else _undirected
        return build(n, np.concatenate(senders), np.concatenate(receivers))

    return _first_connected(draw, "graph.probability", probability)


def _first_connected(draw: Callable[[int], Graph], key: str, value: float) -> Graph:
    for attempt in range(MAX_REDRAWS):
        graph = draw(attempt)
        if is_strongly_connected(graph.num_peers, graph.senders, graph.receivers):
            return graph
    raise ConfigError(
        f"none of {MAX_REDRAWS} random graphs of {graph.num_peers} peers was strongly connected",
        key=key,
        value=value,
        valid=f"more edges (a probability well above ln n / n = {math.log(graph.num_peers) / graph.num_peers:.3g})",
    )


def _switched_lattice(n: int, degree: int, seed: int, attempt: int) -> Graph:
    """Return a random `degree`-regular graph: a ring lattice whose edges were switched in pairs many times.

    A switch replaces a–b, c–d by a–d, c–b and keeps all degrees; ten tries for each edge mix well. Drawing pairings of
    half-edges until one is simple would never end for larger degrees.
    """
    edges = [(peer, (peer + hop) % n) for hop in range(1, degree // 2 + 1) for peer in range(n)]
    if degree % 2:
        edges += [(peer, peer + n // 2) for peer in range(n // 2)]
    # An edge is known by its smaller end times n plus the larger: a set of whole numbers, for a million tries.
    present = {min(edge) * n + max(edge) for edge in edges}
    tries = 10 * len(edges)
    picks = _stream(seed, attempt).integers(2 * tries, 2 * len(edges)).tolist()
    for first, second in zip(picks[:tries], picks[tries:], strict=True):
        # The lowest bit of the second pick says which way round its edge is taken.
        (a, b), (c, d) = edges[first // 2], edges[second // 2]
        if second % 2:
            c, d = d, c
        if a in (c, d) or b in (c, d):
            continue
        ad, cb = a * n + d if a < d else d * n + a, c * n + b if c < b else b * n + c
        if ad in present or cb in present:
            continue
        present.remove(a * n + b if a < b else b * n + a)
        present.remove(c * n + d if c < d else d * n + c)
        present.update((ad, cb))
        edges[first // 2], edges[second // 2] = (a, d), (c, b)
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2)
    return _undirected(n, ends[:, 0], ends[:, 1])


def _stream(seed: int, attempt: int, row: int = 0) -> Stream:
    return stream(seed, SHARED, Purpose.GRAPH, round=attempt, layer=row)


def shift_groups(num_peers: int) -> list[tuple[int, ...]]:
    """Return the shapes of the groups Z_a × Z_b × … over whose shifts a graph family of that many peers may look the
    same from every peer: rings and their like, torus, hypercube."""
    groups: list[tuple[int, ...]] = [(num_peers,)]
    if rows := _torus_rows(num_peers):
        groups.append((rows, num_peers // rows))
    if num_peers > 4 and num_peers & (num_peers - 1) == 0:
        groups.append((2,) * (num_peers.bit_length() - 1))
    return groups


def _torus_rows(num_peers: int) -> int:
    """Return the shorter side of the squarest grid, 0 if there is none with two sides of at least 2."""
    return next((rows for rows in range(math.isqrt(num_peers), 1, -1) if num_peers % rows == 0), 0)


def is_strongly_connected(num_peers: int, senders: IntArray, receivers: IntArray) -> bool:
    """Return whether there is a directed path from every peer to every other."""
    forth = distances(num_peers, senders, receivers, 0)
    back = distances(num_peers, receivers, senders, 0)
    return bool((forth >= 0).all() and (back >= 0).all())


def distances(num_peers: int, senders: IntArray, receivers: IntArray, source: int) -> IntArray:
    """Return int64[n]: the number of hops from `source` to every peer, −1 where there is no path."""
    order = np.argsort(senders, kind="stable")
    targets = receivers[order]
    starts = np.searchsorted(senders[order], np.arange(num_peers + 1))
    hops = np.full(num_peers, -1, dtype=np.int64)
    hops[source] = 0
    frontier = np.array([source], dtype=np.int64)
    while frontier.size:
        counts = starts[frontier + 1] - starts[frontier]
        ends = np.cumsum(counts)
        inside = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + np.repeat(starts[frontier], counts)
        # Not `np.unique`, whose first call imports a megabyte.
        is_reached = np.zeros(num_peers, np.bool_)
        is_reached[targets[inside]] = True
        reached = np.flatnonzero(is_reached & (hops < 0))
        hops[reached] = hops[frontier[0]] + 1
        frontier = reached
    return hops
