"""Low-rank factors of the matrices of a model: projecting onto a basis, multiplying out, orthonormal bases.

A layer of shape (m, k, …) is a matrix M of m rows and k · … columns. A round has one of two sides. On side 0 the basis
is Q, r orthonormal vectors as long as a row, and the factor is M Q, r vectors as long as a column. On side 1 the basis
is P, r vectors as long as a column, and the factor Mᵀ P. Layers whose two factors would hold as many numbers as the
layer, vectors among them, have no basis and are their own factor.

All peers multiply out the same factors and orthonormalize them, and have to get the same bits, whatever their processor
and libraries. These two therefore use only elementwise operations, and sums by halves. A projection is one peer's own,
and has to give the same bits on one machine only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from peer.compress.base import Draws
from peer.compress.float_types import change_, floats_of
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray, Kept
from peer.native import lib, pointer
from peer.random import Stream

_DEPENDENT = 2.0**-20
"""A vector counts as dependent on the earlier ones if less than this fraction of it is left without its shares in
them."""


@dataclass(frozen=True)
class _Layer:
    """One layer: the places of it and of its factor and basis of each side in their flat vectors."""

    part: slice
    shape: tuple[int, int]
    rank: int
    """Vectors of its basis; 0: it is its own factor."""
    factor: tuple[slice, slice]
    basis: tuple[slice, slice]


class Factors:
    """The factors and bases of one layout as flat vectors: those of the first layer, then of the second, and so on;
    the vectors of a layer follow one another."""

    def __init__(self, layout: Layout, rank: int) -> None:
        """`rank`: r of every layer that has a basis."""
        self._layers: list[_Layer] = []
        ends, basis_ends = [0, 0], [0, 0]
        sizes: tuple[list[int], list[int]] = ([], [])
        for part, shape in zip(layout.slices, layout.shapes or [(size,) for size in layout.sizes], strict=True):
            rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
            is_low = rank * (rows + columns) < rows * columns
            vectors, factors, bases = rank if is_low else 1, [], []
            for side, length in enumerate((rows, columns) if is_low else (rows * columns,) * 2):
                factors.append(slice(ends[side], ends[side] + vectors * length))
                ends[side] = factors[side].stop
                sizes[side].extend([length] * vectors)
            for side, length in enumerate((columns, rows)):
                bases.append(slice(basis_ends[side], basis_ends[side] + is_low * rank * length))
                basis_ends[side] = bases[side].stop
            self._layers.append(
                _Layer(part, (rows, columns), is_low * rank, (factors[0], factors[1]), (bases[0], bases[1]))
            )
        self.sizes = (np.array(sizes[0], np.int64), np.array(sizes[1], np.int64))
        """Lengths of the vectors of the factors of each side, int64[vectors]."""
        self.layer_sizes = tuple(
            np.array([each.factor[side].stop - each.factor[side].start for each in self._layers]) for side in (0, 1)
        )
        """Numbers of the factors of each side, int64[layers]."""
        self.size = (ends[0], ends[1])
        """Numbers of the factors of each side."""
        self.basis_size = (basis_ends[0], basis_ends[1])
        """Numbers of the bases onto which each side projects."""

    def project(self, matrices: Kept, basis: FloatArray, side: int) -> FloatArray:
        """Return M Q, or on side 1 Mᵀ P, of all layers of `matrices: float[n]`: float[size[side]]."""
        factors = np.empty(self.size[side], basis.dtype)
        for layer in self._layers:
            factor, matrix = factors[layer.factor[side]], floats_of(matrices[layer.part])
            if layer.rank == 0:
                factor[:] = matrix
                continue
            vectors = basis[layer.basis[side]].reshape(layer.rank, -1)
            order = "ab,ja->jb" if side else "ab,jb->ja"
            np.einsum(order, matrix.reshape(layer.shape), vectors, out=factor.reshape(layer.rank, -1))
        return factors

    def multiply_out(self, factors: FloatArray, basis: FloatArray, side: int) -> FloatArray:
        """Return A Qᵀ, or on side 1 P Aᵀ, of all layers of `factors: float[size[side]]`: float[n] of its type."""
        matrices = np.empty(self._layers[-1].part.stop, factors.dtype)
        for layer in self._layers:
            self._multiply_out_(matrices[layer.part], layer, factors, basis, side)
        return matrices

    def subtract_multiplied_out_(
        self, out: Kept, factors: FloatArray, basis: FloatArray, side: int, rounding: Stream
    ) -> None:
        """Subtract `multiply_out(factors, basis, side)` from `out` in place; one layer of it is in memory at once. In
        bfloat16, each layer is rounded by the next stream."""
        for number, layer in enumerate(self._layers):
            matrix = np.empty(layer.part.stop - layer.part.start, factors.dtype)
            self._multiply_out_(matrix, layer, factors, basis, side)
            subtract_ = partial(_subtract_, matrix)
            change_(out[layer.part], subtract_, replace(rounding, layer=rounding.layer + number))

    def _multiply_out_(
        self, matrix: FloatArray, layer: _Layer, factors: FloatArray, basis: FloatArray, side: int
    ) -> None:
        factor = factors[layer.factor[side]]
        if layer.rank == 0:
            matrix[:] = factor
            return
        pair = factor.reshape(layer.rank, -1), basis[layer.basis[side]].reshape(layer.rank, -1)
        columns, rows = reversed(pair) if side else pair
        _add_outer_products(columns, rows, matrix.reshape(layer.shape))

    def next_basis(self, factors: npt.NDArray[np.float64], side: int, draws: Draws) -> npt.NDArray[np.float64]:
        """Return orthonormal bases of the spans of a side's factors, onto which the other side projects next."""
        bases = np.empty(self.basis_size[1 - side])
        for number, layer in enumerate(self._layers):
            if layer.rank:
                factor = factors[layer.factor[side]].reshape(layer.rank, -1)
                bases[layer.basis[1 - side]] = _orthonormal(factor, draws, number).reshape(-1)
        return bases

    def first_basis(self, side: int, draws: Draws) -> npt.NDArray[np.float64]:
        """Return the bases onto which a side projects if no factors came before: drawn, the same for all peers."""
        return self.next_basis(np.zeros(self.size[1 - side]), 1 - side, draws)


def _subtract_(values: FloatArray, block: FloatArray, part: slice) -> None:
    block -= values[part]


def _add_outer_products(columns: FloatArray, rows: FloatArray, out: FloatArray) -> None:
    """Make `out: float[m, n]` the sum of the outer products of `columns: float[r, m]` and `rows: float[r, n]`, all of
    one type, added in order."""
    if lib is not None:
        single = out.dtype == np.float32
        multiply_out, kind = (lib.multiply_out_f32, "float[]") if single else (lib.multiply_out_f64, "double[]")
        pointers = pointer(columns, kind), pointer(rows, kind)
        multiply_out(*pointers, len(rows), columns.shape[1], rows.shape[1], pointer(out, kind))
        return
    np.multiply.outer(columns[0], rows[0], out=out)
    for column, row in zip(columns[1:], rows[1:], strict=True):
        out += np.multiply.outer(column, row)


def _orthonormal(vectors: npt.NDArray[np.float64], draws: Draws, layer: int) -> npt.NDArray[np.float64]:
    """Return orthonormal rows that span those of `vectors: float64[r, n]`, r < n, by Gram and Schmidt, in order.

    A row that depends on those before it is replaced by one that all peers draw alike: else nothing would ever be
    projected onto that dimension again.
    """
    result, position = np.empty_like(vectors), 0
    while (position := _extend(result, vectors, position)) < len(vectors):
        drawn = draws.shared(layer, vectors.size, np.float64).reshape(vectors.shape) - 0.5
        # Among r + 1 random directions there is one that the r earlier ones do not span, but for rounding.
        before = result[:position]
        result[position] = next(each for row in drawn[position:] if (each := _new_direction(row, before)) is not None)
        position += 1
    return result


def _extend(result: npt.NDArray[np.float64], vectors: npt.NDArray[np.float64], position: int) -> int:
    """Make the rows of `result` from `position` on the new directions of those of `vectors`, as long as there are any;
    return the position of the first that has none."""
    if lib is not None:
        count, n = vectors.shape
        scratch = np.empty(2 * n + count)
        pointers = pointer(result, "double[]"), pointer(scratch, "double[]")
        return lib.orthonormal(pointer(vectors, "double[]"), position, count, n, _DEPENDENT, *pointers)
    while position < len(vectors) and (found := _new_direction(vectors[position], result[:position])) is not None:
        result[position] = found
        position += 1
    return position


def _new_direction(vector: npt.NDArray[np.float64], before: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | None:
    """Return the direction of a vector's rest without its shares in orthonormal rows; None if the rest is nothing."""
    if lib is not None:
        out, scratch = np.empty_like(vector), np.empty(2 * vector.size + len(before))
        found = lib.new_direction(
            pointer(vector, "double[]"), pointer(before, "double[]"), len(before), vector.size, _DEPENDENT,
            pointer(out, "double[]"), pointer(scratch, "double[]"),
        )  # fmt: skip
        return out if found else None
    largest = float(np.abs(vector).max())
    if largest == 0.0:
        return None
    # A power of two, so that squares neither overflow nor vanish.
    rest = np.ldexp(vector, -int(np.frexp(largest)[1]))
    whole = math.sqrt(_sums(rest * rest))
    for _ in range(2):  # Twice is enough: what rounding leaves of the shares the second pass takes out.
        for row, share in zip(before, _sums(before * rest), strict=True):
            rest = rest - share * row
    left = math.sqrt(_sums(rest * rest))
    return None if left <= _DEPENDENT * whole else rest / left


def _sums(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the sums over the last axis, by halves: numpy's own depend on the processor."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        rest = values[..., 2 * half :]
        values = np.concatenate((values[..., :half] + values[..., half : 2 * half], rest), axis=-1)
    return values[..., 0]
