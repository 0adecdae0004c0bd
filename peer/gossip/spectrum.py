"""Speed of mixing: the eigenvalues that decide it, of one matrix or of several that take turns.

No array of num_peers² numbers is made for more than `DENSE_LIMIT` peers. Every result says how it was found.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peer.gossip import graphs
from peer.gossip.mixing_matrix import Float64Array, MixingMatrix

ZERO_EIGENVALUE = 1e-12
"""Eigenvalues below this are rounding errors of 0 (exact averaging, as after one cycle of exponential-one-peer)."""

D2_LEAST_EIGENVALUE = -1.0 / 3.0 + 1e-6
"""D² needs λ_min(W̄) above this. The margin is for uniform even rings: theirs is −1/3 exactly, which floating point
shows as −0.33333333333333315."""

DENSE_LIMIT = 1024
"""Up to this many peers eigenvalues of a graph without a closed form come from the dense matrix."""

KRYLOV_DIMENSION = 160
"""Largest subspace of the iterations."""

CHECK_EVERY = 20
"""Steps between checks of Lanczos's iteration for convergence."""

CONVERGED = 1e-10
"""Residual below which Lanczos's iteration ends."""

KRYLOV_ROUNDS = 64
"""Most rounds of a cycle that one step of Arnoldi's iteration multiplies out."""


class Method(enum.Enum):
    """Method by which eigenvalues were found."""

    CLOSED_FORM = "closed form"
    """For graphs that look the same from every peer, a Fourier transform over their shifts; also for a line."""
    DENSE = "dense matrix"
    LANCZOS = "Lanczos"
    """For a large symmetric matrix. The value is at most the true one, and an eigenvalue lies within the residual."""
    ARNOLDI = "Arnoldi"
    """For another large matrix, or several: an estimate accurate to a few digits."""


@dataclass(frozen=True)
class Contraction:
    """ρ, by which one round shrinks disagreement in the long run, and how it was found."""

    rho: float
    method: Method
    residual: float | None = None
    """With Lanczos's iteration, an upper bound of the distance of ρ from an eigenvalue."""


def smallest_eigenvalue(matrix: MixingMatrix) -> float:
    """Return λ_min of a symmetric W. Raises ValueError for another."""
    if not matrix.is_symmetric:
        raise ValueError("only a symmetric matrix has an ordered spectrum")
    known = _known_eigenvalues(matrix)
    if known is not None:
        return float(known.real.min())
    if matrix.num_peers <= DENSE_LIMIT:
        return float(np.linalg.eigvalsh(matrix.dense())[0])
    return float(lanczos(matrix)[0][0])


def contraction(matrices: Sequence[MixingMatrix], turns: int) -> Contraction:
    """Return the second largest |eigenvalue| of the product over one cycle, in which each matrix has so many turns in a
    row, per round (geometric mean)."""
    num_peers = matrices[0].num_peers
    if num_peers == 1:
        return Contraction(0.0, Method.CLOSED_FORM)
    rho = _known_rho(matrices)
    if rho is not None:
        return Contraction(rho, Method.CLOSED_FORM)
    if num_peers <= DENSE_LIMIT:
        return Contraction(_dense_rho(matrices, turns), Method.DENSE)
    if len(matrices) == 1 and matrices[0].is_symmetric:
        values, residuals = lanczos(matrices[0])
        place = int(np.argmax(np.abs(values)))
        return Contraction(min(float(np.abs(values[place])), 1.0), Method.LANCZOS, float(residuals[place]))
    cycle = [matrix for matrix in matrices for _ in range(min(turns, max(1, KRYLOV_ROUNDS // len(matrices))))]
    return Contraction(_per_round(_log(float(np.abs(_ritz_values(cycle)).max())), len(cycle)), Method.ARNOLDI)


def disagreement_eigenvalues(matrix: MixingMatrix) -> Float64Array:
    """Return eigenvalues of a symmetric W on the vectors of sum 0, ascending: all of them, or of a large graph without
    a closed form the outermost, as Lanczos's iteration finds them."""
    known = _known_eigenvalues(matrix)
    if known is not None:
        return np.sort(known.real)[:-1]
    if matrix.num_peers <= DENSE_LIMIT:
        values: Float64Array = np.linalg.eigvalsh(matrix.dense())[:-1].astype(np.float64)
        return values
    return lanczos(matrix)[0]


def largest_singular_value(matrix: MixingMatrix) -> float:
    """Return the largest singular value of a doubly stochastic W on the vectors of sum 0."""
    known = _known_eigenvalues(matrix)
    if known is not None:
        return float(np.abs(known[1:]).max())  # Such matrices are normal.
    if matrix.is_symmetric:
        return float(np.abs(lanczos(matrix)[0]).max())
    forth, back = matrix, matrix.transposed()
    return math.sqrt(max(0.0, float(lanczos(forth, back)[0][-1])))


def _known_rho(matrices: Sequence[MixingMatrix]) -> float | None:
    """Return ρ of matrices that share known eigenvectors, so that eigenvalues of the product are products; the first
    one is that of the mean."""
    if len(matrices) == 1:
        spectra = [_known_eigenvalues(matrices[0])]
    else:
        spectra = next(
            (found for shape in graphs.shift_groups(matrices[0].num_peers) if (found := _transforms(matrices, shape))),
            [None],
        )
    logs = np.zeros(matrices[0].num_peers - 1)
    for eigenvalues in spectra:
        if eigenvalues is None:
            return None
        logs += np.array([_log(value) for value in np.abs(eigenvalues[1:]).tolist()])
    return _per_round(float(logs.max()), len(matrices))


def _transforms(
    matrices: Sequence[MixingMatrix], shape: tuple[int, ...]
) -> list[npt.NDArray[np.complex128] | None] | None:
    columns = [matrix.shifted_column(shape) for matrix in matrices]
    if any(column is None for column in columns):
        return None
    return [np.fft.fftn(column).reshape(-1) for column in columns if column is not None]


def _known_eigenvalues(matrix: MixingMatrix) -> npt.NDArray[np.complex128] | None:
    """Return all eigenvalues of a graph that has a closed form, complex128[n], that of the mean first."""
    for shape in graphs.shift_groups(matrix.num_peers):
        column = matrix.shifted_column(shape)
        if column is not None:
            return np.fft.fftn(column).reshape(-1).astype(np.complex128)
    weight = _line_weight(matrix)
    if weight is None:
        return None
    # W = I − a L, L the Laplacian of a path.
    angles = np.pi * np.arange(matrix.num_peers) / matrix.num_peers
    return (1.0 - 2.0 * weight * (1.0 - np.cos(angles))).astype(np.complex128)


def _line_weight(matrix: MixingMatrix) -> float | None:
    """Return the weight of every edge of a symmetric W whose edges are 0–1, 1–2, 2–3, …; None for another."""
    off = matrix.column_senders != matrix.column_receivers
    weights = matrix.column_weights[off]
    if weights.size != 2 * (matrix.num_peers - 1) or not matrix.is_symmetric:
        return None
    steps = np.abs(matrix.column_senders[off] - matrix.column_receivers[off])
    return float(weights[0]) if (steps == 1).all() and (weights == weights[0]).all() else None


def _dense_rho(matrices: Sequence[MixingMatrix], turns: int) -> float:
    # 1ᵀW = 1ᵀ, so W maps the vectors of sum 0 to themselves, and W − (1/n)11ᵀ has W's eigenvalues there and 0
    # elsewhere. Products keep that form. The norm is taken out after each factor: a period of thousands of rounds
    # underflows otherwise.
    n = matrices[0].num_peers
    mean = np.full((n, n), 1.0 / n)
    product, log_scale = np.eye(n), 0.0
    for matrix in matrices:
        power, log_power = _scaled_power(matrix.dense() - mean, turns)
        product, log_norm = _scaled(power @ product)
        log_scale += log_power + log_norm
    is_symmetric = len(matrices) == 1 and matrices[0].is_symmetric
    eigenvalues = np.linalg.eigvalsh(product) if is_symmetric else np.linalg.eigvals(product)
    return _per_round(_log(float(np.abs(eigenvalues).max())) + log_scale, len(matrices) * turns)


def _scaled(matrix: Float64Array) -> tuple[Float64Array, float]:
    """Return the matrix divided by its norm, and the norm's logarithm; zeros if it is only rounding errors."""
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


def lanczos(*factors: MixingMatrix) -> tuple[Float64Array, Float64Array]:
    """Return (values, residuals), approximate eigenvalues of a symmetric W on the vectors of sum 0, ascending, and
    upper bounds of their distances from an eigenvalue. W is applied factor by factor, the first one first.

    Lanczos's iteration with full reorthogonalization. The outermost values converge first, from inside the spectrum.
    """
    basis = _start(factors[0].num_peers)
    diagonal: list[float] = []
    below: list[float] = []
    while True:
        step = len(diagonal)
        v = basis[step]
        for factor in factors:
            v = factor.apply(v)
        v = v - v.mean()
        diagonal.append(float(np.einsum("n,n", v, basis[step])))
        v -= diagonal[step] * basis[step]
        if step:
            v -= below[-1] * basis[step - 1]
        # Not by BLAS, whose threads wait for each other longer than such products take.
        v -= np.einsum("k,kn->n", np.einsum("kn,n->k", basis[: step + 1], v), basis[: step + 1])
        norm = float(np.linalg.norm(v))
        is_last = step + 1 == len(basis) - 1 or norm < ZERO_EIGENVALUE
        if is_last or (step + 1) % CHECK_EVERY == 0:
            values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(below, 1) + np.diag(below, -1))
            residuals = norm * np.abs(vectors[-1])
            if is_last or max(residuals[0], residuals[-1]) < CONVERGED:
                return values.astype(np.float64), residuals.astype(np.float64)
        below.append(norm)
        basis[step + 1] = v / norm


def _ritz_values(cycle: Sequence[MixingMatrix]) -> npt.NDArray[np.complex128]:
    """Return approximate eigenvalues of the product of the matrices on vectors of sum 0 (Arnoldi's iteration with full
    reorthogonalization; the outermost eigenvalues converge first)."""
    basis = _start(cycle[0].num_peers)
    steps = len(basis) - 1
    projected = np.zeros((steps + 1, steps))
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


def _start(num_peers: int) -> Float64Array:
    """Return room for the basis of an iteration, a vector of sum 0 in each row; the first one is there."""
    basis = np.zeros((min(KRYLOV_DIMENSION, num_peers - 1) + 1, num_peers))
    # Any start that is not special to one graph will do, and it must be the same on every device.
    start = np.sin(np.arange(num_peers) ** 2 * 0.5 + 1.0)
    start -= start.mean()
    basis[0] = start / np.linalg.norm(start)
    return basis
