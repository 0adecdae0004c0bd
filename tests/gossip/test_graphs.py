"""The graph families: their edges, the sizes they refuse, and the files they read."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.errors import ConfigError
from peer.gossip import graphs
from peer.gossip.graphs import FAMILIES, Graph, GraphFile, GraphRequest, build_graphs, distances, parse_graph_file


def edges(graph: Graph) -> set[tuple[int, int]]:
    return set(zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True))


def build(kind: str, num_peers: int, **options) -> Graph:
    (graph,) = build_graphs(kind, GraphRequest(num_peers=num_peers, **options))
    return graph


def pairs(*undirected: tuple[int, int]) -> set[tuple[int, int]]:
    return {edge for a, b in undirected for edge in ((a, b), (b, a))}


@pytest.mark.parametrize(
    ("kind", "num_peers", "expected"),
    [
        ("directed-ring", 4, {(0, 1), (1, 2), (2, 3), (3, 0)}),
        ("ring", 4, pairs((0, 1), (1, 2), (2, 3), (3, 0))),
        ("ring", 2, pairs((0, 1))),
        ("line", 4, pairs((0, 1), (1, 2), (2, 3))),
        ("torus", 6, pairs((0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3), (0, 3), (1, 4), (2, 5))),
        ("exponential", 5, {(j, (j + hop) % 5) for j in range(5) for hop in (1, 2, 4)}),
        ("hypercube", 4, pairs((0, 1), (2, 3), (0, 2), (1, 3))),
        ("complete", 3, pairs((0, 1), (0, 2), (1, 2))),
        ("star", 4, pairs((0, 1), (0, 2), (0, 3))),
        ("four-node-a", 4, {(0, 1), (1, 2), (2, 3), (3, 0)}),
        ("four-node-b", 4, {(0, 3), (3, 2), (2, 1), (1, 0)}),
        ("four-node-c", 4, {(0, 2), (2, 1), (1, 3), (3, 0)}),
    ],
)
def test_small_graphs_have_the_expected_edges(kind, num_peers, expected):
    graph = build(kind, num_peers)
    assert edges(graph) == expected
    assert graph.senders.size == len(expected)


def test_a_torus_is_as_square_as_the_number_allows():
    # 4 × 4: every peer has four different neighbours; 2 × 5: up and down are the same peer.
    assert build("torus", 16).out_degrees().tolist() == [4] * 16
    assert build("torus", 10).out_degrees().tolist() == [3] * 10


def test_exponential_one_peer_takes_hops_1_2_4_in_turn():
    """One out-neighbour, 2^(t mod ⌈log₂ n⌉) places ahead."""
    for num_peers, hops in ((8, [1, 2, 4]), (6, [1, 2, 4]), (9, [1, 2, 4, 8]), (2, [1])):
        built = build_graphs("exponential-one-peer", GraphRequest(num_peers=num_peers))
        assert [edges(graph) for graph in built] == [
            {(j, (j + hop) % num_peers) for j in range(num_peers)} for hop in hops
        ]


def test_sparse_pushs_three_graphs_rotate_with_the_weights_of_figure_5():
    built = build_graphs("sparse-push-four", GraphRequest(num_peers=4))
    dense = []
    for graph in built:
        w = np.diag(graph.self_weights)
        w[graph.receivers, graph.senders] = graph.weights
        dense.append(w)
    a, b, c = 1 / 2, 1 / 3, 0.0
    keep_a, keep_b = 1 - a, 1 - b
    assert np.array_equal(dense[0], [[keep_a, c, c, b], [a, keep_b, c, c], [c, b, keep_a, c], [c, c, a, keep_b]])
    assert np.array_equal(dense[1], [[keep_a, b, c, c], [c, keep_b, a, c], [c, c, keep_a, b], [a, c, c, keep_b]])
    assert np.array_equal(dense[2], [[keep_a, c, c, b], [c, keep_b, a, c], [a, c, keep_a, c], [c, b, c, keep_b]])


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 40), st.integers(1, 12), st.integers(0, 2**63 - 1))
def test_a_random_regular_graph_is_simple_regular_and_connected(num_peers, degree, seed):
    possible = degree < num_peers and degree * num_peers % 2 == 0 and (degree > 1 or num_peers == 2)
    if not possible:
        with pytest.raises(ConfigError) as caught:
            build("random-regular", num_peers, degree=degree, seed=seed)
        assert caught.value.key == "graph.degree"
        return
    graph = build("random-regular", num_peers, degree=degree, seed=seed)
    assert graph.is_undirected
    assert graph.out_degrees().tolist() == [degree] * num_peers
    assert all(sender != receiver for sender, receiver in edges(graph))
    assert len(edges(graph)) == degree * num_peers
    assert graphs.is_strongly_connected(num_peers, graph.senders, graph.receivers)


def test_a_random_regular_graph_is_mixed_well():
    # A ring lattice of degree 4 has diameter 250 here; a random graph about log₃ 1000.
    graph = build("random-regular", 1000, degree=4, seed=2)
    assert distances(1000, graph.senders, graph.receivers, 0).max() <= 12


def test_erdos_renyi_edges_come_with_the_asked_probability():
    for kind, undirected in (("erdos-renyi", True), ("directed-erdos-renyi", False)):
        graph = build(kind, 100, probability=0.2, seed=1)
        assert graph.is_undirected is undirected
        # Of 4,950 pairs (9,900 ordered ones) a fifth, five standard deviations either way.
        trials = 4950 if undirected else 9900
        drawn = graph.senders.size / (2 if undirected else 1)
        assert abs(drawn - 0.2 * trials) < 5 * (trials * 0.2 * 0.8) ** 0.5


def test_erdos_renyi_is_drawn_anew_until_it_is_strongly_connected():
    # At this probability one directed graph in a few dozen is: most seeds need redraws.
    for seed in range(20):
        graph = build("directed-erdos-renyi", 8, probability=0.3, seed=seed)
        assert graphs.is_strongly_connected(8, graph.senders, graph.receivers)


@pytest.mark.parametrize("kind", ["random-regular", "erdos-renyi", "directed-erdos-renyi"])
def test_random_graphs_are_functions_of_their_seed(kind):
    def draw(seed: int) -> set[tuple[int, int]]:
        return edges(build(kind, 20, degree=4, probability=0.4, seed=seed))

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_random_graphs_stay_what_they_were_in_earlier_versions():
    assert edges(build("random-regular", 8, degree=3, seed=1)) == pairs(*REGULAR_8)
    assert edges(build("erdos-renyi", 5, probability=0.5, seed=1)) == pairs(*BINOMIAL_5)


REGULAR_8 = ((0, 1), (0, 2), (0, 3), (1, 4), (1, 6), (2, 5), (2, 7), (3, 5), (3, 6), (4, 5), (4, 7), (6, 7))
BINOMIAL_5 = ((0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (2, 4), (3, 4))


@pytest.mark.parametrize("kind", sorted(set(FAMILIES) - {"file"}))
def test_a_family_builds_strongly_connected_graphs_without_self_loops_or_refuses_the_size(kind):
    refusals = []
    for num_peers in range(1, 20):
        try:
            built = build_graphs(kind, GraphRequest(num_peers=num_peers, degree=2, probability=0.7))
        except ConfigError as error:
            refusals.append(error)
            continue
        union: set[tuple[int, int]] = set()
        for graph in built:
            union |= edges(graph)
            assert list(zip(graph.senders, graph.receivers, strict=True)) == sorted(edges(graph))
        assert all(sender != receiver for sender, receiver in union)
        ends = np.array(sorted(union), dtype=np.int64).reshape(-1, 2)
        assert graphs.is_strongly_connected(num_peers, ends[:, 0], ends[:, 1])
    assert all(error.key in {"graph.kind", "graph.degree"} and error.valid for error in refusals)
    assert len(refusals) < 19


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_every_family_is_described_in_one_sentence(family):
    assert family.summary.endswith(".")
    assert FAMILIES[family.name] is family


@pytest.mark.parametrize(
    ("kind", "options", "key", "says"),
    [
        ("rings", {}, "graph.kind", "unknown graph .*directed-ring, ring, line"),
        ("hypercube", {"num_peers": 12}, "graph.kind", "power of two.*there are 12.*8 or 16 peers"),
        ("torus", {"num_peers": 7}, "graph.kind", "7 is prime"),
        ("torus", {"num_peers": 3}, "graph.kind", "3 is too small"),
        ("four-node-a", {"num_peers": 8}, "graph.kind", "four nodes, but this run has 8 peers"),
        ("random-regular", {"degree": 8}, "graph.degree", "1 to 7 for 8 peers"),
        ("random-regular", {"num_peers": 7, "degree": 3}, "graph.degree", "both numbers are odd"),
        ("random-regular", {"degree": 1}, "graph.degree", "separate pairs"),
        ("erdos-renyi", {"probability": 0.0}, "graph.probability", "must be a probability"),
        ("erdos-renyi", {"num_peers": 100, "probability": 0.001}, "graph.probability", "strongly connected"),
        ("erdos-renyi", {"seed": -1}, "graph.seed", "out of range"),
        ("erdos-renyi", {"num_peers": 10_000, "probability": 0.9}, "graph.kind", "89,991,000 edges"),
        ("complete", {"num_peers": 10_000}, "graph.kind", "99,990,000 edges"),
        ("ring", {"num_peers": 0}, "peers", "at least one peer"),
        ("file", {}, "graph.file", "name a file"),
    ],
)
def test_settings_without_a_graph_are_refused_with_their_key(kind, options, key, says):
    with pytest.raises(ConfigError, match=says) as caught:
        build_graphs(kind, GraphRequest(**{"num_peers": 8, **options}))
    assert caught.value.key == key


W = [[0.5, 0.25], [0.5, 0.75]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("w.json", json.dumps([W])),
        ("w.json", json.dumps({"matrices": [W]})),
        ("scenario.json", json.dumps({"mixing": [W], "nodes": 2})),
        ("w.json", '{"edges": [[0, 1, 0.5], [1, 0, 0.25]]}'),
        ("w.json", '{"edges": [[0, 0, 0.5], [1, 0, 0.25], [0, 1, 0.5], [1, 1, 0.75]]}'),
        (
            "w.json",
            '{"graphs": [{"edges": [{"from": 0, "to": 1, "weight": 0.5}, {"from": 1, "to": 0, "weight": 0.25}]}]}',
        ),
        ("w.toml", "edges = [[0, 1, 0.5], [1, 0, 0.25]]"),
        ("w.TOML", "[[graphs]]\nedges = [[0, 1, 0.5], [1, 0, 0.25]]"),
        ("w.toml", "matrices = [[[0.5, 0.25], [0.5, 0.75]]]"),
    ],
)
def test_a_file_gives_matrices_or_weighted_edges(name, text):
    (graph,) = parse_graph_file(GraphFile(name, text), 2)
    assert edges(graph) == {(0, 1), (1, 0)}
    assert graph.weights.tolist() == [0.5, 0.25]
    assert graph.self_weights.tolist() == [0.5, 0.75]


def test_a_file_may_leave_the_weights_to_the_configuration():
    one, two = parse_graph_file(GraphFile("g.json", '{"graphs": [{"edges": [[0, 1]]}, {"edges": [[1, 0]]}]}'), 2)
    assert one.weights is None
    assert (edges(one), edges(two)) == ({(0, 1)}, {(1, 0)})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("3", "table or a list"),
        ("{}", "none of `matrices`, `edges`"),
        ('{"matrices": []}', "at least one matrix"),
        ('{"matrices": [[[1, 0]]]}', "shape \\(1, 2\\), but the run has 2 peers"),
        ('{"matrices": [[[1, 0], [1]]]}', "not a square table"),
        ('{"matrices": [[["a", 0], [0, 1]]]}', "not a square table"),
        ('{"graphs": []}', "none of"),
        ('{"graphs": [7]}', "no list `edges`"),
        ('{"edges": [[0, 2]]}', "numbered from 0 to 1"),
        ('{"edges": [[0, -1]]}', "numbered from 0 to 1"),
        ('{"edges": [[0]]}', "not \\[sender, receiver\\]"),
        ('{"edges": [[0.0, 1]]}', "not \\[sender, receiver\\]"),
        ('{"edges": [{"to": 1}]}', "not \\[sender, receiver\\]"),
        ('{"edges": [[0, 1, "x"]]}', "not a number"),
        ('{"edges": [[0, 1], [0, 1]]}', "twice"),
        ('{"edges": [[0, 1, 0.5], [1, 0]]}', "only some of its edges"),
    ],
)
def test_a_file_that_describes_no_graph_is_refused_with_its_name(text, says):
    with pytest.raises(ConfigError, match=says) as caught:
        parse_graph_file(GraphFile("graph.json", text), 2)
    assert (caught.value.key, caught.value.file) == ("graph.file", "graph.json")


def test_a_toml_file_that_is_not_toml_is_refused():
    with pytest.raises(ConfigError, match="not valid TOML"):
        parse_graph_file(GraphFile("graph.toml", "edges = ["), 2)


def test_distances_count_hops_and_mark_the_unreachable():
    senders, receivers = np.array([0, 1, 2, 4]), np.array([1, 2, 0, 0])
    assert distances(5, senders, receivers, 0).tolist() == [0, 1, 2, -1, -1]
    assert distances(5, receivers, senders, 0).tolist() == [0, 2, 1, -1, 1]
    assert not graphs.is_strongly_connected(5, senders, receivers)
