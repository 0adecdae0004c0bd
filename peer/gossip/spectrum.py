"""How fast matrices mix: the eigenvalues that decide it, of one matrix or of several that take turns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from peer.gossip.mixing_matrix import Float64Array, MixingMatrix

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


def smallest_eigenvalue(matrix: MixingMatrix) -> float:
    """Return λ_min of a symmetric W. Raises ValueError for another."""
    if not matrix.is_symmetric:
        raise ValueError("only a symmetric matrix has an ordered spectrum")
    if matrix.circulant is not None:
        return float(np.fft.fft(matrix.circulant).real.min())
    if matrix.num_peers <= DENSE_LIMIT:
        return float(np.linalg.eigvalsh(matrix.dense())[0])
    return float(_ritz_values([matrix]).real.min())


def second_eigenvalue(matrices: Sequence[MixingMatrix], turns: int) -> float:
    """Return the second largest |eigenvalue| of the product over one cycle, in which each matrix has so many turns in a
    row, per round (geometric mean)."""
    num_peers = matrices[0].num_peers
    if num_peers == 1:
        return 0.0
    circulants = [matrix.circulant for matrix in matrices]
    if all(first is not None for first in circulants):
        return _circulant_rho([first for first in circulants if first is not None])
    if num_peers <= DENSE_LIMIT:
        return _dense_rho(matrices, turns)
    cycle = [matrix for matrix in matrices for _ in range(min(turns, max(1, KRYLOV_ROUNDS // len(matrices))))]
    return _per_round(_log(float(np.abs(_ritz_values(cycle)).max())), len(cycle))


def _circulant_rho(circulants: Sequence[Float64Array]) -> float:
    # Circulant matrices share their eigenvectors, so the eigenvalues of the product are products; the first one is that
    # of the mean.
    logs = np.zeros(circulants[0].size - 1)
    for first in circulants:
        magnitude = np.abs(np.fft.fft(first)[1:])
        logs += np.array([_log(value) for value in magnitude.tolist()])
    return _per_round(float(logs.max()), len(circulants))


def _dense_rho(matrices: Sequence[MixingMatrix], turns: int) -> float:
    # 1ᵀW = 1ᵀ, so W maps the vectors of sum 0 to themselves, and W − (1/n)11ᵀ has W's eigenvalues there and 0 beside
    # them. Products keep that form. The norm is taken out after each factor: a period of thousands of rounds underflows
    # otherwise.
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
