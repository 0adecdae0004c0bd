"""Vectors that compressors must survive, and draws that tests choose themselves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peer.compress.decompress import decompress_layers
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray, LayerPayload, num_values


def awkward(dtype: npt.DTypeLike) -> dict[str, np.ndarray]:
    """Return named vectors with the values and sizes at which mistakes show."""
    kind = np.dtype(dtype)
    info = np.finfo(kind)
    rng = np.random.default_rng(5)
    normal = rng.normal(size=3001).astype(kind)
    return {
        "one": np.array([0.7], kind),
        "one zero": np.zeros(1, kind),
        "zeros": np.zeros(130, kind),
        "negative zeros": np.full(130, -0.0, kind),
        "zeros of both signs": np.tile(np.array([0.0, -0.0], kind), 40),
        "equal magnitudes": np.where(rng.random(500) < 0.5, 1.5, -1.5).astype(kind),
        "denormal": (rng.integers(-9, 10, 200) * float(info.smallest_subnormal)).astype(kind),
        "large": (rng.normal(size=300) * (float(info.max) / (1e8 if kind == np.float32 else 1e160))).astype(kind),
        "wide": (rng.normal(size=2000) * 10.0 ** rng.uniform(-20, 10, 2000)).astype(kind),
        "one spike": np.concatenate([np.zeros(999), [1e6]]).astype(kind),
        "normal": normal,
        "unaligned": normal[1:],
        "strided": normal[::2],
        "long": rng.standard_t(3, size=20_011).astype(kind),
        "rounded": rng.integers(-3, 4, 9000).astype(kind),
    }


AWKWARD_NAMES = tuple(awkward(np.float32))


@dataclass
class GivenDraws:
    """Draws that hold what a test puts in."""

    uniforms: np.ndarray | None = None
    drawn_words: np.ndarray | None = None

    def own(self, layer: int, size: int, dtype: npt.DTypeLike) -> np.ndarray:
        assert self.uniforms is not None
        return self.uniforms[:size].astype(dtype)

    def shared(self, layer: int, size: int, dtype: npt.DTypeLike) -> np.ndarray:
        return self.own(layer, size, dtype)

    def words(self, layer: int, size: int) -> np.ndarray:
        assert self.drawn_words is not None
        return self.drawn_words[:size].astype(np.uint32)


def decompressed(payload: LayerPayload, dtype: npt.DTypeLike) -> FloatArray:
    """Return the values of one layer."""
    return decompress_layers((payload,), Layout.of_sizes([num_values(payload)]), dtype)
