"""Momentum: turns a gradient g into the direction G that takes its place in every algorithm.

A gradient longer than `clip_norm` is shortened first. Then comes weight decay: g ← g + λ z, z before the round.
`heavy-ball`: m ← β m + g, G = m. `nesterov`: m ← β m + g, G = g + β m. Quasi-global (Lin et al. 2021): `qg` G = β m̂ +
g, `qg-nesterov` m = β m̂ + g, G = g + β m, where m̂ follows the whole round's change of z, gossip included: m̂ ← μ m̂ +
(1 − μ)(z_before − z_after)/γ. `adam`: G = m̄ / (√v̄ + ε). `adamw` (Loshchilov and Hutter 2019): G = m̄ / (√v̄ + ε) + λ z,
of g without weight decay. `muon` (Jordan et al. 2024): m ← β m + (1 − β) g, and for a hidden matrix a × b
G = 0.2 √max(a, b) orthogonal((1 − β) g + β m) + λ z, about as long as Adam's (Liu et al. 2025, "Muon is Scalable for
LLM Training"); adamw for all else.

Knows neither torch nor the algorithms: it takes vectors and returns vectors, so that replay checks what training uses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.compress.decompress import add_dense_
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.errors import ConfigError
from peer.records import ADAPTIVE

KINDS = ("none", "heavy-ball", "nesterov", "qg", "qg-nesterov", *ADAPTIVE)

_DECOUPLED = ("adamw", "muon")

_BLOCK = 1 << 15
"""Numbers whose squares are in memory at once."""


class Momentum:
    """The momentum of one peer."""

    def __init__(
        self,
        kind: str = "none",
        *,
        beta: float = 0.9,
        mu: float | None = None,
        weight_decay: float = 0.0,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        clip_norm: float | None = None,
        layout: Layout | None = None,
    ) -> None:
        """`mu` is `beta` unless set; without `clip_norm` no gradient is shortened. `layout`: of a vector, of which
        several may lie side by side; without one, no matrix is hidden. Raises ConfigError for values out of range."""
        if kind not in KINDS:
            raise ConfigError("unknown kind of momentum", key="momentum.kind", value=kind, valid=", ".join(KINDS))
        for key, value in (("beta", beta), ("mu", mu), ("beta2", beta2)):
            if value is not None and not 0.0 <= value < 1.0:
                raise ConfigError("is out of range", key=f"momentum.{key}", value=value, valid="0 to below 1")
        if not (np.isfinite(weight_decay) and weight_decay >= 0.0):
            raise ConfigError("is out of range", key="momentum.weight_decay", value=weight_decay, valid="0 or more")
        if clip_norm is not None and not clip_norm > 0.0:
            raise ConfigError("is out of range", key="momentum.clip_norm", value=clip_norm, valid="above 0")
        self.kind, self.beta, self.mu = kind, beta, beta if mu is None else mu
        self.weight_decay, self.beta2, self.epsilon, self.clip_norm = weight_decay, beta2, epsilon, clip_norm
        self._layout = layout
        self._hidden = frozenset(layout.hidden if layout and kind == "muon" else ())
        self._steps = 0
        self._m: FloatArray | None = None
        self._v: FloatArray | None = None
        self._direction: FloatArray | None = None

    @property
    def needs_round(self) -> bool:
        """Whether `after_round` has anything to do (the quasi-global kinds)."""
        return self.kind in ("qg", "qg-nesterov")

    @property
    def first_step(self) -> float:
        """How many times as long as a gradient its part of the direction is; 0 where a direction has a length of its
        own, however long the gradients are."""
        if self.kind in ADAPTIVE:
            return 0.0
        return 1.0 + self.beta if self.kind in ("nesterov", "qg-nesterov") else 1.0

    def direction_(self, gradient: FloatArray, z: FloatArray) -> FloatArray:
        """Return `direction(gradient, z)`; it takes the memory of the gradient if it needs any."""
        self._direction = gradient
        found, self._direction = self.direction(gradient, z), None
        return found

    def direction(self, gradient: FloatArray, z: FloatArray) -> FloatArray:
        """Return G for the gradient at `z`, both float[n]. Neither is changed; G is good until the next call."""
        g = gradient
        if self.clip_norm is not None and (factor := shortening(gradient, self.clip_norm)) < 1.0:
            g = self._scratch(gradient)
            g *= g.dtype.type(factor)
        if self.weight_decay > 0.0 and self.kind not in _DECOUPLED:
            g = self._scratch(g)
            add_dense_(g, z, self.weight_decay)
        if self.kind == "none":
            return g
        if self._m is None:
            self._m = np.zeros_like(g)
        m, beta = self._m, g.dtype.type(self.beta)
        if self.kind in ADAPTIVE:
            result = self._adaptive(g, m)
            if self.kind in _DECOUPLED and self.weight_decay > 0.0:
                add_dense_(result, z, self.weight_decay)
            return result
        if self.kind in ("heavy-ball", "nesterov"):
            m *= beta
            m += g
            if self.kind == "heavy-ball":
                return m
            result = self._scratch(g)
            add_dense_(result, m, self.beta)
            return result
        result = self._scratch(g)
        if self.kind == "qg":
            add_dense_(result, m, self.beta)
            return result
        # g + β (β m̂ + g)
        result *= g.dtype.type(1.0 + self.beta)
        add_dense_(result, m, self.beta * self.beta)
        return result

    def after_round(self, z_before: FloatArray, z_after: FloatArray, rate: float, part: slice = slice(None)) -> None:
        """Let quasi-global momentum follow the round's change of z; `rate` is γ of the round, 0 leaves m̂.

        `part`: where these numbers lie in the vector, once there was a `direction` of the whole.
        """
        if not self.needs_round or rate == 0.0:
            return
        if self._m is None:
            assert part == slice(None)
            self._m = np.zeros_like(z_before)
        m = self._m[part]
        m *= m.dtype.type(self.mu)
        share = (1.0 - self.mu) / rate
        add_dense_(m, z_before, share)
        add_dense_(m, z_after, -share)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return the state that must survive a crash: the kind's moments, and Adam's number of steps."""
        vectors = {"m": self._m, "v": self._v}
        state = {name: vector for name, vector in vectors.items() if vector is not None}
        return {"steps": np.array([self._steps], np.int64), **state}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a result of `state`."""
        self._steps = int(state["steps"][0])
        self._m = np.array(state["m"], copy=True) if "m" in state else None
        self._v = np.array(state["v"], copy=True) if "v" in state else None

    def _scratch(self, values: FloatArray) -> FloatArray:
        """Return the buffer of the direction, holding `values`."""
        if self._direction is None or self._direction.dtype != values.dtype:
            self._direction = values.copy()
        elif self._direction is not values:
            self._direction[:] = values
        return self._direction

    def size_of(self, name: str) -> int:
        """Return how many numbers of a vector "m" and "v" have."""
        assert self._layout is not None
        hidden = self._hidden if name == "v" else ()
        return self._layout.size - sum(self._layout.sizes[number] for number in hidden)

    def _adaptive(self, g: FloatArray, m: FloatArray) -> FloatArray:
        """Let m follow g; return Adam's direction, and that of Muon for hidden matrices."""
        layout = self._layout or Layout.of_sizes((g.size,))
        if self._v is None:
            without = sum(layout.sizes[number] for number in self._hidden)
            self._v = np.zeros(g.size // layout.size * (layout.size - without), g.dtype)
        self._steps += 1
        m *= g.dtype.type(self.beta)
        add_dense_(m, g, 1.0 - self.beta)
        result, start, used = self._scratch(g), 0, 0
        while start < g.size:
            for number, size in enumerate(layout.sizes):
                part = slice(start, start + size)
                if number in self._hidden:
                    rows = layout.shapes[number][0]
                    muon_(result[part].reshape(rows, -1), m[part].reshape(rows, -1), self.beta)
                else:
                    self._adam_(result[part], m[part], self._v[used : used + size])
                    used += size
                start += size
        return result

    def _adam_(self, g: FloatArray, m: FloatArray, v: FloatArray) -> None:
        """Make g the direction of Kingma and Ba 2015, Algorithm 1, where m has followed it."""
        dtype = g.dtype.type
        v *= dtype(self.beta2)
        for start in range(0, g.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            add_dense_(v[part], g[part] * g[part], 1.0 - self.beta2)
        np.divide(v, dtype(1.0 - self.beta2**self._steps), out=g)
        np.sqrt(g, out=g)
        g += dtype(self.epsilon)
        np.divide(m, g, out=g)
        g /= dtype(1.0 - self.beta**self._steps)


def muon_(g: FloatArray, m: FloatArray, beta: float) -> None:
    """Make g: float[a, b] Muon's direction, where m has followed it: (1 − β) g + β m with singular values between 0.7
    and 1.2, by five steps of Newton and Schulz with the coefficients of Jordan et al."""
    g *= g.dtype.type(1.0 - beta)
    g += m * m.dtype.type(beta)
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (2.0315 * (square @ square) - 4.7750 * square) @ x
    np.multiply(x.T if g.shape[0] > g.shape[1] else x, 0.2 * math.sqrt(max(g.shape)), out=g)


def shortening(gradient: FloatArray, most: float) -> float:
    """Return the factor that makes a gradient `most` long; 1 for a shorter one, and for one that is not finite."""
    parts = (gradient[start : start + _BLOCK] for start in range(0, gradient.size, _BLOCK))
    norm = math.sqrt(sum(float(np.dot(part, part)) for part in parts))
    return most / norm if most < norm < math.inf else 1.0
