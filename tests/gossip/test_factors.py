"""Factors of matrices: what is projected, what comes back, and bases that are the same for all peers."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from peer import native
from peer.compress.layout import Layout
from peer.gossip import factors as factors_module
from peer.gossip.factors import Factors
from peer.random import PhiloxSource

LAYOUT = Layout.of_shapes([(6, 2, 5), (7,), (4, 3), (8, 9), ()])
"""At rank 2 the first and the fourth layer have a basis: 2 · (4 + 3) numbers are more than twelve."""
DRAWS = PhiloxSource(7, 0).draws(3)


def matrices_of(vector):
    return [
        vector[part].reshape(shape[0], -1) for part, shape in zip(LAYOUT.slices, LAYOUT.shapes, strict=True) if shape
    ]


@pytest.mark.parametrize("side", [0, 1])
def test_factors_are_projections_and_small_layers_go_whole(side):
    factors = Factors(LAYOUT, 2)
    m = np.random.default_rng(0).normal(size=LAYOUT.size)
    basis = factors.first_basis(side, DRAWS)
    lengths = [(6, 6, 7, 12, 8, 8, 1), (10, 10, 7, 12, 9, 9, 1)][side]
    assert factors.sizes[side].tolist() == list(lengths)
    assert factors.size[side] == sum(lengths)
    assert factors.basis_size[side] == basis.size == [2 * (10 + 9), 2 * (6 + 8)][side]
    a = factors.project(m, basis, side)
    first, _, _, fourth = matrices_of(m)
    width = first.shape[1 - side]
    one, other = basis[: 2 * width].reshape(2, -1), basis[2 * width :].reshape(2, -1)
    wanted = [one @ (first if side else first.T), other @ (fourth if side else fourth.T)]
    split = np.split(a, np.cumsum(lengths)[[1, 2, 3, 5]])
    np.testing.assert_allclose(split[0], wanted[0].reshape(-1), atol=1e-12)
    np.testing.assert_allclose(split[3], wanted[1].reshape(-1), atol=1e-12)
    assert split[1].tolist() == m[LAYOUT.slices[1]].tolist()
    assert split[2].tolist() == m[LAYOUT.slices[2]].tolist()
    assert split[4].tolist() == m[LAYOUT.slices[4]].tolist()
    back = factors.multiply_out(a, basis, side)
    project = one.T @ one
    np.testing.assert_allclose(matrices_of(back)[0], project @ first if side else first @ project, atol=1e-12)
    # A projection: what was projected once stays as it is.
    np.testing.assert_allclose(factors.project(back, basis, side), a, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bases_are_orthonormal_and_span_the_factors(dtype):
    factors = Factors(Layout.of_shapes([(40, 30)]), 4)
    rng = np.random.default_rng(1)
    given = rng.normal(size=(4, 40)) * 10.0 ** np.array([[0], [-12], [150], [-150]])
    given[1] += given[0]
    basis = factors.next_basis(given.reshape(-1), 0, DRAWS).astype(dtype).reshape(4, 40).astype(float)
    np.testing.assert_allclose(basis @ basis.T, np.eye(4), atol=1e-6 if dtype is np.float32 else 1e-12)
    for row in given[[0, 2, 3]]:
        unit = row / np.abs(row).max()
        np.testing.assert_allclose(unit, unit @ basis.T @ basis, atol=1e-5)


def test_vectors_that_say_nothing_new_are_replaced_by_drawn_ones():
    """Else a matrix that was zero once would be zero for ever."""
    factors = Factors(Layout.of_shapes([(20, 30), (20, 30)]), 3)
    given = np.zeros((2, 3, 20))
    given[1, 0] = given[1, 1] = np.arange(20.0)
    basis = factors.next_basis(given.reshape(-1), 0, DRAWS).reshape(2, 3, 20)
    for own in basis:
        np.testing.assert_allclose(own @ own.T, np.eye(3), atol=1e-12)
    np.testing.assert_allclose(basis[1, 0], np.arange(20.0) / np.linalg.norm(np.arange(20.0)), atol=1e-12)
    again = factors.next_basis(given.reshape(-1), 0, PhiloxSource(7, 5).draws(3))
    assert again.tobytes() == basis.tobytes(), "another peer draws the same"
    assert factors.next_basis(given.reshape(-1), 0, PhiloxSource(7, 0).draws(4)).tobytes() != basis.tobytes()


def test_what_all_peers_compute_has_the_same_bits_on_every_machine():
    """Elementwise operations are exact to the last bit everywhere; sums of numpy's own and of BLAS are not."""
    layout = Layout.of_shapes([(16, 3, 3, 3), (64, 576), (10,)])
    factors = Factors(layout, 4)
    digest = hashlib.sha256()
    for side in (0, 1):
        # Integer arithmetic alone makes the numbers.
        numbers = ((np.arange(factors.size[side], dtype=np.int64) * 7919 + 12345) % 65536 - 32768) / 4096.0
        basis = factors.next_basis(numbers, side, DRAWS)
        digest.update(basis.tobytes())
        back = np.resize(numbers, factors.size[1 - side]).astype(np.float32)
        digest.update(factors.multiply_out(back, basis.astype(np.float32), 1 - side).tobytes())
    assert digest.hexdigest() == "ad15c7809a4906e1738e5ee3a603f23b5f7f0c6c35f810618ba10d7a05fc790e"


@pytest.mark.skipif(not native.available(), reason="the kernels are not built")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("rank", "shape"), [(1, (2, 3)), (3, (7, 33)), (16, (64, 576))])
def test_the_kernel_and_numpy_multiply_out_to_the_same_bits(dtype, rank, shape, monkeypatch):
    factors = Factors(Layout.of_shapes([shape]), rank)
    rng = np.random.default_rng(rank)
    for side in (0, 1):
        given, basis = (rng.normal(size=size).astype(dtype) for size in (factors.size[side], factors.basis_size[side]))
        matrices = []
        for lib in (native.lib, None):
            monkeypatch.setattr(factors_module, "lib", lib)
            matrices.append(factors.multiply_out(given, basis, side))
        assert matrices[0].tobytes() == matrices[1].tobytes()


@pytest.mark.skipif(not native.available(), reason="the kernels are not built")
@pytest.mark.parametrize("shape", [(2, 3), (7, 33), (64, 576)])
@pytest.mark.parametrize("magnitude", [1.0, 1e-300, 5e-324, 1e300])
def test_the_kernel_and_numpy_find_the_same_bases(shape, magnitude, monkeypatch):
    rank = 1 if shape == (2, 3) else 5
    factors = Factors(Layout.of_shapes([shape]), rank)
    rng = np.random.default_rng(shape[0])
    for side in (0, 1):
        given = rng.normal(size=(rank, shape[side])) * 10.0 ** rng.integers(-30, 30, size=(1, shape[side]))
        if rank > 1:
            # Two that say nothing new, one of them the last.
            given[2], given[4] = given[0], 0.0
        with np.errstate(over="ignore"):
            given = np.clip(given * magnitude, -1e308, 1e308)
        bases = []
        for lib in (native.lib, None):
            monkeypatch.setattr(factors_module, "lib", lib)
            bases.append(factors.next_basis(given.reshape(-1), side, DRAWS))
        assert bases[0].tobytes() == bases[1].tobytes()
