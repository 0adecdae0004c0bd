"""Layout of a model's tensors in one flat vector: the layers on which compressors act."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Layout:
    """Names and sizes of the layers of a flat vector, in order and without gaps."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the tensors, in row-major order; empty if they are not needed."""
    hidden: tuple[int, ...] = ()
    """Numbers of the layers that are matrices between a model's embeddings and its last layer; with shapes."""

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or not self.sizes:
            raise ValueError("a layout needs at least one layer and one name for each size")
        if min(self.sizes) < 1:
            raise ValueError("every layer holds at least one number")
        if self.shapes and tuple(map(math.prod, self.shapes)) != self.sizes:
            raise ValueError("the shapes of the layers do not have their sizes")

    @classmethod
    def of_sizes(cls, sizes: list[int] | tuple[int, ...]) -> Layout:
        """Return a layout whose layers are named by their position."""
        return cls(tuple(f"layer{i}" for i in range(len(sizes))), tuple(sizes))

    @classmethod
    def of_shapes(cls, shapes: Sequence[tuple[int, ...]], names: Sequence[str] | None = None) -> Layout:
        """Return a layout of tensors; without names they are named by their position."""
        names = names or [f"layer{i}" for i in range(len(shapes))]
        return cls(tuple(names), tuple(map(math.prod, shapes)), tuple(shapes))

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The slice of the flat vector that each layer occupies."""
        result, start = [], 0
        for size in self.sizes:
            result.append(slice(start, start + size))
            start += size
        return tuple(result)

    @cached_property
    def size_array(self) -> npt.NDArray[np.int64]:
        """The sizes as kernels take them, int64[layers]; nobody writes to it."""
        sizes = np.array(self.sizes, np.int64)
        sizes.flags.writeable = False
        return sizes

    @property
    def num_layers(self) -> int:
        return len(self.sizes)

    @cached_property
    def size(self) -> int:
        """Length of the flat vector."""
        return sum(self.sizes)

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 over names and sizes: equal on two peers exactly when their models have the same shape."""
        text = "\n".join(f"{name}\t{size}" for name, size in zip(self.names, self.sizes, strict=True))
        return hashlib.sha256(text.encode()).hexdigest()
