"""Mixing matrices and their schedule: weights, turns, and the properties that the theory asks for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.errors import ConfigError
from peer.gossip import graphs, spectrum
from peer.gossip.base import MixingSchedule
from peer.gossip.graphs import GraphFile
from peer.gossip.mixing_matrix import MixingMatrix
from peer.gossip.topology import Schedule, build_schedule

FIXED_KINDS = sorted(set(graphs.FAMILIES) - {"file", "sparse-push-four", "exponential-one-peer"})


def options_of(kind: str) -> dict:
    return {"num_peers": 4 if "four" in kind else 8, "kinds": kind}


@st.composite
def column_stochastic(draw, num_peers=None):
    """A random matrix of positive diagonal whose columns sum to 1, as tests of algorithms use them."""
    n = num_peers or draw(st.integers(2, 12))
    source = np.random.Generator(np.random.Philox(draw(st.integers(0, 2**32))))
    w = source.random((n, n)) * (source.random((n, n)) < draw(st.floats(0, 1)))
    np.fill_diagonal(w, 0.2 + source.random(n))
    return w / w.sum(axis=0)


def reference_rho(schedule: Schedule) -> float:
    """The definition, for small n: the eigenvalues of one cycle's product, the largest (1) left out."""
    product = np.eye(schedule.num_peers)
    for t in range(schedule.cycle_rounds):
        product = schedule.at(t).dense() @ product
    magnitudes = np.sort(np.abs(np.linalg.eigvals(product)))
    return float(magnitudes[-2] ** (1 / schedule.cycle_rounds))


@pytest.mark.parametrize("weights", ["auto", "uniform", "metropolis"])
@pytest.mark.parametrize("kind", FIXED_KINDS)
def test_columns_sum_to_1_and_every_peer_keeps_a_part(kind, weights):
    try:
        schedule = build_schedule(**options_of(kind), weights=weights)
    except ConfigError as error:
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert weights == "metropolis"
        assert "directed" in str(refusal)
        return
    w = schedule.at(0).dense()
    assert np.abs(w.sum(axis=0) - 1).max() < 1e-12
    assert (w.diagonal() > 0).all()


def test_uniform_weights_split_evenly_among_receivers_and_oneself():
    w = build_schedule(4, "star", weights="uniform").at(0).dense()
    assert w[:, 0].tolist() == [0.25] * 4
    assert w[:, 3].tolist() == [0.5, 0, 0, 0.5]


def test_metropolis_weights_follow_the_larger_degree_and_are_symmetric():
    schedule = build_schedule(4, "star", weights="metropolis")
    assert np.allclose(schedule.at(0).dense()[0], [0.25, 0.25, 0.25, 0.25])
    assert np.allclose(schedule.at(0).dense()[1], [0.25, 0.75, 0, 0])
    assert schedule.is_doubly_stochastic
    assert schedule.is_symmetric


@pytest.mark.parametrize("kind", ["ring", "torus", "hypercube", "complete", "random-regular"])
def test_on_regular_graphs_uniform_and_metropolis_weights_are_the_same(kind):
    uniform = build_schedule(8, kind, weights="uniform")
    assert np.allclose(uniform.at(0).dense(), build_schedule(8, kind, weights="metropolis").at(0).dense(), atol=1e-15)
    assert uniform.is_doubly_stochastic


def test_auto_weights_take_those_of_the_graph_else_what_the_algorithm_needs():
    auto, explicit = (build_schedule(4, "four-node-a", weights=rule) for rule in ("auto", "explicit"))
    assert np.array_equal(auto.at(0).dense(), explicit.at(0).dense())
    assert build_schedule(8, "star").is_doubly_stochastic
    assert not build_schedule(8, "star", doubly=False).is_doubly_stochastic
    assert np.array_equal(build_schedule(8, "directed-ring").at(0).dense()[1], [0.5, 0.5, 0, 0, 0, 0, 0, 0])
    # Why push-sum gets uniform weights on irregular graphs.
    assert build_schedule(8, "star", doubly=False).spectral_gap > 3 * build_schedule(8, "star").spectral_gap


@pytest.mark.parametrize("kind", ["directed-ring", "exponential", "ring", "torus", "hypercube", "complete"])
def test_regular_graphs_with_uniform_weights_are_doubly_stochastic(kind):
    assert build_schedule(8, kind).is_doubly_stochastic


def test_only_undirected_graphs_are_symmetric():
    symmetric = {kind for kind in FIXED_KINDS if build_schedule(**options_of(kind)).is_symmetric}
    assert symmetric == {"ring", "line", "torus", "hypercube", "complete", "star", "random-regular", "erdos-renyi"}


@settings(max_examples=100, deadline=None)
@given(column_stochastic())
def test_sparse_storage_holds_the_matrix_to_the_last_bit(w):
    schedule = Schedule.from_matrices([w])
    n = w.shape[0]
    assert np.array_equal(schedule.at(0).dense(), w)
    assert schedule.is_symmetric == np.allclose(w, w.T, rtol=0, atol=1e-12)
    for peer in range(n):
        receivers, column = schedule.at(0).column(peer)
        senders, row = schedule.at(0).row(peer)
        assert np.array_equal(column, w[receivers, peer])
        assert np.array_equal(row, w[peer, senders])
        assert schedule.receivers(0, peer) == tuple(i for i in range(n) if w[i, peer] and i != peer)
        assert schedule.senders(0, peer) == tuple(j for j in range(n) if w[peer, j] and j != peer)
        assert schedule.all_senders(peer) == schedule.senders(7, peer)
        assert [schedule.weight(0, peer, j) for j in range(n)] == w[peer].tolist()
    v = np.arange(n) + 0.5
    assert np.allclose(schedule.matrices[0].apply(v), w @ v)


def test_a_schedule_is_what_algorithms_expect():
    schedule: MixingSchedule = build_schedule(4, "sparse-push-four", period_rounds=3)
    assert schedule.num_peers == 4
    assert type(schedule.senders(0, 0)[0]) is int


def test_graphs_take_turns_each_for_its_period():
    schedule = build_schedule(4, ["four-node-a", "four-node-b", "four-node-c"], period_rounds=3)
    order = [schedule.index(t) for t in range(12)]
    assert order == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0]
    assert schedule.cycle_rounds == 9
    for t in range(12):
        assert np.array_equal(schedule.at(t).dense(), build_schedule(4, f"four-node-{'abc'[order[t]]}").at(0).dense())
    assert schedule.digest == build_schedule(4, "sparse-push-four", period_rounds=3).digest


def test_a_replica_must_reach_everyone_who_ever_hears_the_sender():
    schedule = build_schedule(4, "sparse-push-four")
    assert schedule.receivers(0, 0) == (1,)
    assert schedule.all_receivers(0) == (1, 2, 3)
    assert schedule.all_senders(0) == (1, 3)
    assert schedule.messages_per_round == 4
    # 0 → 1, 2, 3; 1 → 0, 2, 3; 2 → 1, 3; 3 → 0, 2.
    assert schedule.replica_messages_per_round == 10


def test_the_digest_names_weights_and_turns():
    ring = build_schedule(8, "ring")
    assert len(ring.digest) == 64
    assert ring.digest == build_schedule(8, ["ring"], weights="uniform").digest
    assert ring.digest == Schedule.from_matrices([ring.at(0).dense()]).digest
    # One graph that never changes has no period.
    assert ring.digest == build_schedule(8, "ring", period_rounds=5).digest
    others = [
        build_schedule(9, "ring"),
        build_schedule(8, "directed-ring"),
        build_schedule(8, ["ring", "ring"]),
        build_schedule(8, ["ring", "directed-ring"]),
        build_schedule(8, ["ring", "directed-ring"], period_rounds=2),
        build_schedule(8, ["directed-ring", "ring"]),
    ]
    assert len({ring.digest, *(other.digest for other in others)}) == 7


def test_strong_connectivity_is_asked_of_the_union_over_the_cycle():
    halves = [
        [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]],
        [[0.5, 0, 0, 0.5], [0, 0.5, 0.5, 0], [0, 0.5, 0.5, 0], [0.5, 0, 0, 0.5]],
    ]
    first = Schedule.from_matrices(halves[:1])
    assert not first.is_strongly_connected
    assert first.diameter is None
    assert first.spectral_gap == pytest.approx(0, abs=1e-12)
    both = Schedule.from_matrices(halves)
    assert both.is_strongly_connected
    assert not any(matrix.is_strongly_connected for matrix in both.matrices)
    # Two exchanges of halves average four peers exactly.
    assert both.second_eigenvalue == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize(
    ("kind", "num_peers", "diameter"),
    [
        ("directed-ring", 8, 7),
        ("ring", 8, 4),
        ("ring", 9, 4),
        ("line", 70, 69),
        ("torus", 16, 4),
        ("exponential", 16, 4),
        ("hypercube", 128, 7),
        ("complete", 8, 1),
        ("star", 130, 2),
        ("sparse-push-four", 4, 2),
        ("directed-ring", 1, 0),
    ],
)
def test_diameters(kind, num_peers, diameter):
    assert build_schedule(num_peers, kind).diameter == diameter


@settings(max_examples=60, deadline=None)
@given(column_stochastic())
def test_the_diameter_is_the_longest_shortest_path(w):
    schedule = Schedule.from_matrices([w])
    reach, hops = np.eye(w.shape[0]) > 0, 0
    while not reach.all() and hops < w.shape[0]:
        reach = (w > 0).astype(int) @ reach > 0
        hops += 1
    assert schedule.diameter == (hops if reach.all() else None)


@pytest.mark.parametrize(
    ("kind", "num_peers", "rho"),
    [
        ("directed-ring", 8, np.cos(np.pi / 8)),
        ("ring", 8, (1 + 2 * np.cos(np.pi / 4)) / 3),
        ("torus", 16, 0.6),
        ("hypercube", 8, 0.5),
        ("complete", 8, 0.0),
        ("star", 8, 7 / 8),
        ("exponential", 8, 0.5),
        ("exponential-one-peer", 8, 0.0),
        ("line", 2, 0.0),
    ],
)
def test_known_second_eigenvalues(kind, num_peers, rho):
    schedule = build_schedule(num_peers, kind)
    assert schedule.second_eigenvalue == pytest.approx(rho, abs=1e-12)
    assert schedule.spectral_gap == pytest.approx(1 - rho, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.lists(column_stochastic(num_peers=5), min_size=1, max_size=3), st.integers(1, 3))
def test_the_spectral_gap_is_that_of_one_cycle_per_round(matrices, period):
    schedule = Schedule.from_matrices(matrices, period)
    # Eigenvalues of a non-normal product are accurate to about the third root of the rounding errors only.
    assert schedule.second_eigenvalue == pytest.approx(min(reference_rho(schedule), 1.0), abs=2e-5)


def test_the_gap_of_a_long_period_does_not_underflow():
    short = build_schedule(4, "sparse-push-four", period_rounds=100)
    long = build_schedule(4, "sparse-push-four", period_rounds=10_000)
    assert 0.25 < short.spectral_gap < 0.35
    assert long.spectral_gap == pytest.approx(short.spectral_gap, abs=2e-3)


def test_graphs_that_look_alike_from_every_peer_are_recognized_and_others_are_not():
    for kind in ("directed-ring", "ring", "exponential", "complete"):
        assert build_schedule(8, kind).matrices[0].shifted_column((8,)) is not None
    for kind in ("hypercube", "torus"):
        (matrix,) = build_schedule(16, kind).matrices
        assert matrix.looks_alike_everywhere
        assert matrix.shifted_column((16,)) is None
    for kind in ("line", "star"):
        assert not build_schedule(8, kind).matrices[0].looks_alike_everywhere
    w = build_schedule(8, "ring").at(0).dense().copy()
    w[0, 0], w[1, 0] = w[1, 0] + 0.1, w[0, 0] - 0.1
    assert not Schedule.from_matrices([w]).matrices[0].looks_alike_everywhere


@pytest.mark.parametrize("kind", ["line", "torus", "erdos-renyi", "directed-erdos-renyi", "sparse-push-four"])
def test_the_iteration_for_large_graphs_agrees_with_the_dense_eigenvalues(kind, monkeypatch):
    num_peers = 4 if kind == "sparse-push-four" else 100
    dense = build_schedule(num_peers, kind, probability=0.1)
    monkeypatch.setattr(spectrum, "DENSE_LIMIT", 1)
    iterated = build_schedule(num_peers, kind, probability=0.1)
    assert iterated.second_eigenvalue == pytest.approx(dense.second_eigenvalue, abs=1e-6)
    if dense.is_symmetric:
        assert iterated.smallest_slack_eigenvalue() == pytest.approx(dense.smallest_slack_eigenvalue(), abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "num_peers", "smallest"),
    [
        ("ring", 4, -1 / 3),
        ("ring", 8, -1 / 3),
        ("ring", 10, -1 / 3),
        ("ring", 16, -1 / 3),
        ("hypercube", 8, -0.5),
        ("torus", 16, -0.6),
        ("complete", 5, 0.0),
    ],
)
def test_smallest_eigenvalues_that_decide_over_d2(kind, num_peers, smallest):
    schedule = build_schedule(num_peers, kind)
    assert schedule.smallest_slack_eigenvalue() == pytest.approx(smallest, abs=1e-12)
    # W̄ = ηW + (1 − η)I.
    assert schedule.smallest_slack_eigenvalue(0.5) == pytest.approx((smallest + 1) / 2, abs=1e-12)


def test_an_asymmetric_matrix_has_no_smallest_eigenvalue():
    with pytest.raises(ValueError, match="symmetric"):
        build_schedule(8, "directed-ring").smallest_slack_eigenvalue()


@pytest.mark.parametrize("kind", ["exponential-one-peer", "torus", "directed-ring"])
def test_ten_thousand_peers_fit(kind):
    schedule = build_schedule(10_000, kind)
    stored = sum(m.column_weights.size + m.row_weights.size for m in schedule.matrices)
    assert stored <= 2 * 14 * 5 * 10_000
    assert len(schedule.senders(3, 9_999)) >= 1
    assert 0 < schedule.spectral_gap < 1
    assert schedule.is_strongly_connected
    assert len(schedule.digest) == 64


@pytest.mark.parametrize(
    ("w", "key", "says"),
    [
        ([[0.5, 0.0], [0.4, 1.0]], "graph.weights", r"column 0 .*sums to 0\.9"),
        ([[0.5, 0.0], [0.333, 1.0]], "graph.weights", "column 0"),
        ([[1.5, 0.0], [-0.5, 1.0]], "graph.weights", "negative weight from peer 0 to peer 1"),
        ([[0.0, 0.5], [1.0, 0.5]], "graph.weights", "peer 0 keeps no part"),
        ([[float("nan"), 0.0], [0.5, 1.0]], "graph.weights", "not a finite number"),
        ([[float("inf"), 0.0], [0.5, 1.0]], "graph.weights", "not a finite number"),
        ([[1.0, 0.0]], "graph.file", "not square"),
    ],
)
def test_matrices_that_lose_or_mint_mass_are_refused(w, key, says):
    with pytest.raises(ConfigError, match=says) as caught:
        Schedule.from_matrices([w])
    assert caught.value.key == key


def test_the_faulty_one_of_several_matrices_is_named():
    good, bad = np.eye(3), np.diag([1.0, 0.5, 1.0])
    with pytest.raises(ConfigError, match="column 1 of matrix 1, which holds what peer 1 sends and keeps, sums to 0"):
        Schedule.from_matrices([good, bad])
    with pytest.raises(ConfigError, match="differ in size"):
        Schedule.from_matrices([good, np.eye(2)])
    with pytest.raises(ConfigError, match="at least one matrix"):
        Schedule.from_matrices([])


@pytest.mark.parametrize(
    ("options", "key", "says"),
    [
        ({"weights": "even"}, "graph.weights", "not one of the choices"),
        ({"weights": "explicit"}, "graph.weights", "ring does not define weights"),
        ({"kinds": "directed-ring", "weights": "metropolis"}, "graph.weights", "directed-ring is directed"),
        ({"period_rounds": 0}, "graph.period", "1 or more rounds"),
        ({"kinds": []}, "graph.kind", "name at least one graph"),
        ({"kinds": ["ring", "rings"]}, "graph.kind", "unknown graph"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_their_key(options, key, says):
    with pytest.raises(ConfigError, match=says) as caught:
        build_schedule(**{"num_peers": 8, "kinds": "ring", **options})
    assert caught.value.key == key


def test_a_file_of_matrices_is_taken_as_it_is():
    text = '{"matrices": [[[0.5, 0.25], [0.5, 0.75]], [[1, 0], [0, 1]]]}'
    schedule = build_schedule(2, "file", file=GraphFile("w.json", text), period_rounds=2)
    assert schedule.at(1).dense().tolist() == [[0.5, 0.25], [0.5, 0.75]]
    assert schedule.at(2).dense().tolist() == [[1, 0], [0, 1]]
    with pytest.raises(ConfigError, match="not a finite number"):
        build_schedule(1, "file", file=GraphFile("w.json", "[[[NaN]]]"))


def test_an_edge_of_weight_0_carries_no_message():
    text = '{"edges": [[0, 1, 0.0], [1, 0, 0.5]]}'
    schedule = build_schedule(2, "file", file=GraphFile("w.json", text))
    assert schedule.receivers(0, 0) == ()
    assert schedule.messages_per_round == 1
    dense = MixingMatrix.from_dense(schedule.at(0).dense())
    assert dense.num_edges == 1
