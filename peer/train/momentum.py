"""Momentum: turns a gradient g into the direction G that takes its place in every algorithm.

A gradient longer than `clip_norm` is shortened first. Then comes weight decay: g ← g + λ z, z before the round.
`heavy-ball`: m ← β m + g, G = m. `nesterov`: m ← β m + g, G = g + β m. Quasi-global (Lin et al. 2021): `qg` G = β m̂ +
g, `qg-nesterov` m = β m̂ + g, G = g + β m, where m̂ follows the whole round's change of z, gossip included: m̂ ← μ m̂ +
(1 − μ)(z_before − z_after)/γ. `adam`: G = m̄ / (√v̄ + ε). `adamw` (Loshchilov and Hutter 2019): G = m̄ / (√v̄ + ε) + λ z,
of g without weight decay.

Knows neither torch nor the algorithms: it takes vectors and returns vectors, so that replay checks what training uses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.compress.decompress import add_dense_
from peer.compress.payload import FloatArray
from peer.errors import ConfigError

KINDS = ("none", "heavy-ball", "nesterov", "qg", "qg-nesterov", "adam", "adamw")

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
    ) -> None:
        """`mu` is `beta` unless set; without `clip_norm` no gradient is shortened. Raises ConfigError for values out of
        range."""
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
        if self.kind in ("adam", "adamw"):
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
        if self.weight_decay > 0.0 and self.kind != "adamw":
            g = self._scratch(g)
            add_dense_(g, z, self.weight_decay)
        if self.kind == "none":
            return g
        if self._m is None:
            self._m = np.zeros_like(g)
        m, beta = self._m, g.dtype.type(self.beta)
        if self.kind in ("adam", "adamw"):
            result = self._adam(g, m)
            if self.kind == "adamw" and self.weight_decay > 0.0:
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

    def _adam(self, g: FloatArray, m: FloatArray) -> FloatArray:
        """Kingma and Ba 2015, Algorithm 1."""
        if self._v is None:
            self._v = np.zeros_like(g)
        self._steps += 1
        dtype, v = g.dtype.type, self._v
        m *= dtype(self.beta)
        add_dense_(m, g, 1.0 - self.beta)
        v *= dtype(self.beta2)
        for start in range(0, g.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            add_dense_(v[part], g[part] * g[part], 1.0 - self.beta2)
        result = self._scratch(v)
        result /= dtype(1.0 - self.beta2**self._steps)
        np.sqrt(result, out=result)
        result += dtype(self.epsilon)
        np.divide(m, result, out=result)
        result /= dtype(1.0 - self.beta**self._steps)
        return result


def shortening(gradient: FloatArray, most: float) -> float:
    """Return the factor that makes a gradient `most` long; 1 for a shorter one, and for one that is not finite."""
    parts = (gradient[start : start + _BLOCK] for start in range(0, gradient.size, _BLOCK))
    norm = math.sqrt(sum(float(np.dot(part, part)) for part in parts))
    return most / norm if most < norm < math.inf else 1.0
