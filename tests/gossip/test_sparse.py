"""Graphs of many peers: nothing of n² numbers is ever allocated, and what is computed equals the dense twin."""

from __future__ import annotations

import re
import resource
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer import gossip
from peer.cli.graph import graph_facts
from peer.compress import build as build_compressor
from peer.gossip import spectrum, theta, validate
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.gossip.mixing_matrix import MixingMatrix
from peer.gossip.spectrum import Method
from peer.gossip.topology import Schedule, build_schedule
from peer.gossip.views import ViewSchedule
from peer.report import graph_view
from tests.gossip.scenarios import column_stochastic

MANY = 20_000


@st.composite
def matrices(draw):
    """A random matrix whose columns sum to 1."""
    return column_stochastic(np.random.default_rng(draw(st.integers(0, 2**32))), draw(st.integers(2, 9)))


def dense_without(w, peers):
    """Return the matrix without the edges of some peers, one peer after the other; their weights stay."""
    left = w.copy()
    for peer in sorted(peers):
        kept = np.diagonal(left) + left[peer]
        others = np.arange(len(left)) != peer
        left[others, others] = kept[others]
        left[peer], left[:, peer] = 0.0, 0.0
        left[peer, peer] = 1.0
    return left


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("ring", Method.CLOSED_FORM),
        ("exponential-one-peer", Method.CLOSED_FORM),
        ("torus", Method.CLOSED_FORM),
        ("line", Method.CLOSED_FORM),
        ("star", Method.LANCZOS),
        ("random-regular", Method.LANCZOS),
    ],
)
def test_twenty_thousand_peers_take_no_array_of_their_square(kind, method):
    # Less than two bits for each pair of peers.
    with memory_limited_to(MANY**2 // 4):
        schedule = build_schedule(MANY, kind)
        compressor = build_compressor("top_k", fraction=0.1)
        plan = validate.RuleInput(gossip.ALGORITHMS["choco-sgd"].spec, schedule, compressor, averaging_rate=0.3)
        validate.check(plan)
        assert "spectral gap" in graph_view.text(schedule)
        if kind != "exponential-one-peer":
            theta.second_eigenvalue(schedule.at(0))
            theta.pairwise_mixing_time(schedule.at(0)) if kind == "random-regular" else None
        assert schedule.contraction.method is method
        assert schedule.weight(5, 0, 0) > 0.0


def test_an_array_of_the_square_of_twenty_thousand_peers_would_be_noticed():
    with pytest.raises(MemoryError), memory_limited_to(MANY**2 // 4):
        np.zeros((MANY, MANY), bool)


@contextmanager
def memory_limited_to(more_bytes):
    """Refuse this process so many bytes more than it has: the peak that tracemalloc measures, at no cost."""
    held = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(held[1]) + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_the_facts_of_a_graph_say_how_its_gap_was_found():
    facts = graph_facts(build_schedule(16, "torus"))
    assert (facts["spectral_method"], facts["spectral_residual"]) == ("closed form", None)
    assert graph_facts(build_schedule(16, "star"))["spectral_method"] == "dense matrix"
    assert "(closed form)" in graph_view.text(build_schedule(16, "torus"))
    large = build_schedule(1500, "random-regular")
    assert graph_facts(large)["spectral_residual"] < 1e-3
    assert "(Lanczos, at most; residual" in graph_view.text(large)


def test_the_diameter_of_a_large_irregular_graph_is_a_bound(monkeypatch):
    exact = build_schedule(500, "random-regular")
    assert exact.diameter_is_exact
    monkeypatch.setattr("peer.gossip.mixing_matrix.EXACT_DIAMETER_PEERS", 100)
    bounded = build_schedule(500, "random-regular")
    assert not bounded.diameter_is_exact
    assert exact.diameter <= bounded.diameter <= 2 * exact.diameter
    assert f"at most {bounded.diameter}" in graph_view.text(bounded)
    assert build_schedule(512, "hypercube").diameter_is_exact


def test_the_diameter_follows_the_sources_block_by_block(monkeypatch):
    whole = build_schedule(300, "random-regular").diameter
    monkeypatch.setattr("peer.gossip.mixing_matrix.DIAMETER_BLOCK", 64)
    assert build_schedule(300, "random-regular").diameter == whole


@settings(max_examples=60, deadline=None)
@given(matrices(), st.data())
def test_taking_peers_out_equals_the_dense_twin(w, data):
    n = len(w)
    gone = data.draw(st.sets(st.integers(0, n - 1), max_size=n - 1))
    matrix = MixingMatrix.from_dense(w)
    expected = dense_without(w, gone)
    assert np.array_equal(matrix.without(gone).dense(), expected)
    members = [peer for peer in range(n) if peer not in gone]
    assert np.array_equal(matrix.among(members).dense(), expected[np.ix_(members, members)])
    wide = np.eye(n + 2)
    places = [position + (position > 0) for position in range(n)]
    wide[np.ix_(places, places)] = w
    assert np.array_equal(matrix.spread_over(n + 2, places).dense(), wide)
    assert np.array_equal(matrix.transposed().dense(), w.T)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["ring", "directed-ring", "exponential-one-peer", "star"]), st.integers(4, 9), st.data())
def test_the_weights_of_a_view_equal_its_dense_twin(kind, n, data):
    members = tuple(range(n))
    membership = Membership(members)
    views = ViewSchedule(n, membership, lambda members: build_schedule(len(members), kind))
    leaver, absent = data.draw(st.permutations(members))[:2]
    membership.add(Change(ChangeKind.LEAVE, leaver, leaver, 3))
    views.treat_as_absent(absent, 2)
    for t in range(6):
        present = [peer for peer in members if t < 3 or peer != leaver]
        w = np.eye(n)
        w[np.ix_(present, present)] = build_schedule(len(present), kind).at(t).dense()
        w = dense_without(w, [absent] if t >= 2 else [])
        assert np.array_equal(views.at(t).dense(), w)
        assert all(views.weight(t, i, j) == w[i, j] for i in members for j in members)


@pytest.mark.parametrize(("kind", "n"), [("torus", 36), ("torus", 30), ("hypercube", 64), ("line", 40), ("ring", 9)])
def test_closed_forms_equal_the_dense_eigenvalues(kind, n):
    matrix = build_schedule(n, kind).at(0)
    eigenvalues = np.linalg.eigvalsh(matrix.dense())
    found = spectrum.contraction([matrix], 1)
    assert found.method is Method.CLOSED_FORM
    assert found.rho == pytest.approx(np.sort(np.abs(eigenvalues))[-2], abs=1e-12)
    assert spectrum.smallest_eigenvalue(matrix) == pytest.approx(eigenvalues[0], abs=1e-12)
    assert spectrum.disagreement_eigenvalues(matrix) == pytest.approx(eigenvalues[:-1], abs=1e-12)


def test_a_line_of_other_weights_has_no_closed_form():
    w = build_schedule(5, "line").at(0).dense()
    w[0, 1] = w[1, 0] = 0.25
    w[0, 0], w[1, 1] = 0.75, 1 - 0.25 - w[2, 1]
    schedule = Schedule.from_matrices([w])
    assert schedule.contraction.method is Method.DENSE
    assert schedule.second_eigenvalue == pytest.approx(np.linalg.eigvalsh(w)[-2], abs=1e-12)


@pytest.mark.parametrize("kind", ["random-regular", "erdos-renyi", "star"])
def test_lanczos_is_as_close_to_the_dense_eigenvalues_as_it_says(kind):
    matrix = build_schedule(200, kind, probability=0.05).at(0)
    eigenvalues = np.linalg.eigvalsh(matrix.dense())[:-1]
    values, residuals = spectrum.lanczos(matrix)
    for place in (0, -1):
        assert np.abs(eigenvalues - values[place]).min() <= residuals[place] + 1e-12
    # From inside the spectrum, up to rounding.
    assert eigenvalues[0] - 1e-12 <= values[0]
    assert values[-1] <= eigenvalues[-1] + 1e-12
    assert values[-1] == pytest.approx(eigenvalues[-1], abs=1e-8)


@pytest.mark.parametrize("kind", ["ring", "random-regular", "exponential"])
def test_constants_of_the_theorems_of_large_graphs_equal_those_of_the_dense_matrix(kind, monkeypatch):
    dense, large = build_schedule(100, kind).at(0), build_schedule(100, kind).at(0)
    expected = theta.second_eigenvalue(dense), theta.pairwise_mixing_time(dense)
    d1 = theta.d2_constant(dense, 0.5) if dense.is_symmetric else None
    monkeypatch.setattr(theta, "DENSE_LIMIT", 1)
    monkeypatch.setattr(spectrum, "DENSE_LIMIT", 1)
    assert (theta.second_eigenvalue(large), theta.pairwise_mixing_time(large)) == pytest.approx(expected, rel=1e-6)
    if d1 is not None:
        assert theta.d2_constant(large, 0.5) == pytest.approx(d1, rel=1e-6)


def test_the_singular_value_of_an_asymmetric_matrix_comes_from_its_transpose(monkeypatch):
    rng = np.random.default_rng(0)
    w = np.mean([np.eye(30)[rng.permutation(30)] for _ in range(4)] + [np.eye(30)], axis=0)
    expected = np.linalg.norm(w - 1 / 30, 2)
    monkeypatch.setattr(theta, "DENSE_LIMIT", 1)
    assert theta.second_eigenvalue(MixingMatrix.from_dense(w)) == pytest.approx(expected, rel=1e-9)
