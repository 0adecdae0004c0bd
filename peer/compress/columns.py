"""The layers of a message field by field, as kernels take and return them in one call; item by item it is a payload.

Most messages hold one kind of payload with one set of parameters in every layer, and perhaps small layers whole. Their
codes, reals and indices then lie one after another in three arrays. Code that handles a payload layer by layer can
handle `Columns`; fast paths look for them first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from peer.compress.levels import code_type
from peer.compress.magnitude import max_magnitude
from peer.compress.payload import Dense, FloatArray, LayerPayload, Levels, Residues, Rounding, Sparse, ValueType

IntegerArray: TypeAlias = npt.NDArray[np.int64]
CodeArray: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

DENSE, LEVELS, RESIDUES = 0, 1, 2
"""Content of a layer: the lowest two bits of its form."""
SPARSE = 4
"""Bit of a form that marks a sparse layer."""

NO_INDICES: IntegerArray = np.zeros(0, np.int64)
NO_REALS: FloatArray = np.zeros(0, np.float32)
NO_CODES: CodeArray = np.zeros(0, np.uint8)


@dataclass(eq=False, kw_only=True)
class Columns(Sequence[LayerPayload]):
    """A payload by columns. Levels and residues do not occur together. Not frozen, though nobody changes one: to make a
    frozen dataclass of so many fields takes a fifth of the time of decoding a small message."""

    sizes: IntegerArray
    """int64[layers]"""
    forms: npt.NDArray[np.uint8]
    """uint8[layers]: `DENSE`, `LEVELS` or `RESIDUES`, the first two perhaps with `SPARSE`."""
    counts: IntegerArray
    """Number of reals or codes of each layer: k of sparse layers, the size of all others. int64[layers]"""
    scalars: npt.NDArray[np.float64]
    """The scale or θ of each layer; 0 for reals. float64[layers]"""
    indices: IntegerArray = field(default_factory=lambda: NO_INDICES)
    """Indices of all sparse layers, each counted from the beginning of its layer."""
    reals: FloatArray = field(default_factory=lambda: NO_REALS)
    value_type: ValueType = ValueType.FLOAT32
    """Type of the reals."""
    codes: CodeArray = field(default_factory=lambda: NO_CODES)
    """Codes of all levels, or all residues."""
    levels: tuple[int, int, int, int] | None = None
    """divisor, base, step and bits of all levels."""
    residues: tuple[int, Rounding] | None = None
    """bits and rounding of all residues."""
    checks: npt.NDArray[np.uint64] | None = None
    """Checks of all residues, and anything for other layers: uint64[layers]."""

    @property
    def bits(self) -> int:
        """The width of the codes; 0 if there are none."""
        if self.levels is not None:
            return self.levels[3]
        return 0 if self.residues is None else self.residues[0]

    @cached_property
    def is_sparse(self) -> npt.NDArray[np.bool_]:
        """Mask of the sparse layers: bool[layers]."""
        return self.forms >= SPARSE

    @cached_property
    def has_reals(self) -> npt.NDArray[np.bool_]:
        """Mask of the layers with reals: bool[layers]."""
        reals: npt.NDArray[np.bool_] = (self.forms & 3) == DENSE
        return reals

    @cached_property
    def magnitude(self) -> float:
        """max |v| of the reals, infinity or NaN if any is."""
        return max_magnitude(self.reals)

    @cached_property
    def largest(self) -> float:
        """A bound of |v| over the values of all layers; θ of modulo codes, which is a distance between values."""
        of_codes = np.abs(self.scalars)
        if self.levels is not None:
            divisor, base, step, bits = self.levels
            of_codes = of_codes * float(max(abs(base), abs(base + step * ((1 << bits) - 1)))) / divisor
        return max(self.magnitude, float(of_codes.max(initial=0.0)))

    @cached_property
    def is_modulo(self) -> bool:
        """Whether all layers have forms in which a modulo code can be sent: residues or reals, none sparse."""
        return not bool((self.is_sparse | ~(self.has_reals | (self.residues is not None))).any())

    def fits(self, sizes: IntegerArray) -> bool:
        """Return whether the layers have these sizes."""
        # Columns decoded or compressed for a layout hold the array of the layout itself.
        return self.sizes is sizes or np.array_equal(self.sizes, sizes)

    def reaching(self, magnitude: float) -> Columns:
        """Record the largest magnitude of the reals, found elsewhere; return this object."""
        self.__dict__["magnitude"] = magnitude
        return self

    def __len__(self) -> int:
        return self.sizes.size

    @overload
    def __getitem__(self, index: int) -> LayerPayload: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[LayerPayload, ...]: ...

    def __getitem__(self, index: int | slice) -> LayerPayload | tuple[LayerPayload, ...]:
        return self._layers[index]

    @cached_property
    def _layers(self) -> tuple[LayerPayload, ...]:
        """The payload of each layer, made when the first is asked for; all share the columns' memory."""
        layers: list[LayerPayload] = []
        at = reals = codes = 0
        for number, (form, size, count, scalar) in enumerate(
            zip(self.forms.tolist(), self.sizes.tolist(), self.counts.tolist(), self.scalars.tolist(), strict=True)
        ):
            kind = form & 3
            if kind == RESIDUES:
                assert self.residues is not None
                check = None if self.checks is None else int(self.checks[number])
                layers.append(Residues(scalar, *self.residues, self.codes[codes : codes + count], check))
                codes += count
                continue
            values: Dense | Levels
            if kind == DENSE:
                values = Dense(self.reals[reals : reals + count], self.value_type)
                reals += count
            else:
                assert self.levels is not None
                values = Levels(scalar, *self.levels, self.codes[codes : codes + count])
                codes += count
            if form & SPARSE:
                layers.append(Sparse(size, self.indices[at : at + count], values))
                at += count
            else:
                layers.append(values)
        return tuple(layers)


def columns_of(layers: Sequence[LayerPayload]) -> Columns | None:
    """Return the layers as columns, or None if these cannot hold them: repairs, several sets of parameters, reals of
    several types, residues with and without a check, arrays of other types than the payload's own."""
    if isinstance(layers, Columns):
        return layers
    sizes, forms, counts, scalars = [], [], [], []
    indices, reals, codes = [], [], []
    levels: set[tuple[int, int, int, int]] = set()
    residues: set[tuple[int, Rounding]] = set()
    types, checks = set(), []
    for layer in layers:
        values = layer.values if isinstance(layer, Sparse) else layer
        form, scalar = SPARSE if isinstance(layer, Sparse) else 0, 0.0
        check = None
        if isinstance(values, Dense):
            held: npt.NDArray[Any] = values.values
            kind: type[np.generic] = np.float64 if values.value_type is ValueType.FLOAT64 else np.float32
            types.add(values.value_type)
            reals.append(values.values)
        elif isinstance(values, Levels):
            held, form, scalar = values.codes, form | LEVELS, values.scale
            kind = code_type(values.bits)
            levels.add((values.divisor, values.base, values.step, values.bits))
            codes.append(values.codes)
        elif isinstance(values, Residues):
            held, form, scalar, check = values.residues, form | RESIDUES, values.theta, values.check
            kind = code_type(values.bits)
            residues.add((values.bits, values.rounding))
            codes.append(values.residues)
        else:
            return None
        if held.dtype != kind or not held.flags.c_contiguous:
            return None
        if isinstance(layer, Sparse):
            if layer.indices.dtype != np.int64 or layer.indices.size != held.size:
                return None
            indices.append(layer.indices)
        sizes.append(layer.size if isinstance(layer, Sparse) else held.size)
        forms.append(form)
        counts.append(held.size)
        scalars.append(scalar)
        checks.append(check)
    of_codes = [check for check, form in zip(checks, forms, strict=True) if form & 3 == RESIDUES]
    checked = [check for check in of_codes if check is not None]
    if max(len(types), len(levels) + len(residues)) > 1 or 0 < len(checked) < len(of_codes):
        return None
    return Columns(
        sizes=np.array(sizes, np.int64),
        forms=np.array(forms, np.uint8),
        counts=np.array(counts, np.int64),
        scalars=np.array(scalars, np.float64),
        indices=np.concatenate(indices) if indices else NO_INDICES,
        reals=np.concatenate(reals) if reals else NO_REALS,
        value_type=next(iter(types), ValueType.FLOAT32),
        codes=np.concatenate(codes) if codes else NO_CODES,
        levels=next(iter(levels), None),
        residues=next(iter(residues), None),
        checks=np.array([check or 0 for check in checks], np.uint64) if checked else None,
    )
