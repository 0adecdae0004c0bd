"""θ of the modulo code, the allowed distance of two neighbours' numbers: the theorems' bounds, and the adaptive rule.

Three modes. *constant*: given, one number or one for each round. *theorem*: the bounds below with the largest gradient
seen so far; rigorous and loose. *verified*: from measured distances, safe because every code carries a hash and wrong
integers are repaired exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from peer.compress.modulo import Modulo, delta
from peer.compress.payload import Rounding
from peer.errors import ConfigError
from peer.gossip.mixing_matrix import MixingMatrix
from peer.gossip.options import ThetaMode
from peer.gossip.spectrum import DENSE_LIMIT, disagreement_eigenvalues, largest_singular_value

MODES: tuple[ThetaMode, ...] = get_args(ThetaMode)

SAFETY = 2.0
"""Verified: θ is at least this many times the largest distance measured."""
SHRINK = 0.95
"""Verified: θ falls by this factor a round at most, so that one quiet round does not cost repairs in the next."""
HOLD_ROUNDS = 16
"""Verified: θ falls in the last of so many rounds only, for all of them. In between the codes lie on one grid, so that
those of a round predict those of the next, and only differences have to be sent (`wire.last_codes`)."""
KEEP = 1.5
"""Verified: in between θ stays while it is so many times the largest distance, and no neighbour's so many times it."""
GROWTH = 2.0
"""Verified: after a violation θ is at least this many times the θ that was too small."""

_KEPT = 4
"""Matrices whose theorem constants are kept: all peers of a process ask for those of one graph."""


def theorem_2(rate: float, gradient_bound: float, num_peers: int, rho: float, *, decay: float = 1.0) -> float:
    """Return θ = 2 γ G∞ C_α ln(16 n) / (1 − η_α ρ) for Moniqua.

    `decay` C_α and η_α describe the step size, γ_k / γ_{k+t} ≤ C_α η_α^t (both 1 for a constant one, and η_α is 1
    here); they are not the averaging rate. `rho` is the second largest magnitude of W's eigenvalues, below 1.
    """
    return 2.0 * rate * gradient_bound * decay * math.log(16 * num_peers) / (1.0 - rho)


def theorem_3(rate: float, gradient_bound: float, num_peers: int, rho: float, averaging_rate: float) -> float:
    """Return θ = 2 γ G∞ ln(16 n) / (η (1 − ρ)) for Moniqua with the slack matrix η W + (1 − η) I."""
    return 2.0 * rate * gradient_bound * math.log(16 * num_peers) / (averaging_rate * (1.0 - rho))


def theorem_4(rate: float, gradient_bound: float, num_peers: int, d1: float) -> float:
    """Return θ = (6 D₁ n + 8) γ G∞ for Moniqua on D²."""
    return (6.0 * d1 * num_peers + 8.0) * rate * gradient_bound


def theorem_5(rate: float, gradient_bound: float, mixing_time: float) -> float:
    """Return θ = 16 t_mix γ G∞ for Moniqua on AD-PSGD."""
    return 16.0 * mixing_time * rate * gradient_bound


@lru_cache(maxsize=_KEPT)
def second_eigenvalue(matrix: MixingMatrix) -> float:
    """Return ρ of a doubly stochastic W: its largest singular value besides that of the average."""
    n = matrix.num_peers
    if n <= DENSE_LIMIT:
        return float(np.linalg.norm(matrix.dense() - np.full((n, n), 1.0 / n), 2)) if n > 1 else 0.0
    return largest_singular_value(matrix)


@lru_cache(maxsize=_KEPT)
def d2_constant(matrix: MixingMatrix, averaging_rate: float = 1.0) -> float:
    """Return D₁ of a symmetric W: the reach of one disturbance in D², summed over all later rounds.

    Along an eigenvector of W̄ with eigenvalue λ the rounds are y_{t+1} = λ (2 y_t − y_{t−1} + e_t); this is Σ_k |r_k|
    of that recurrence's impulse response r, for the worst λ below 1. The paper says of D₁ only that the eigenvalues
    determine it. Raises ConfigError if the sum does not converge (λ ≤ −1/3).
    """
    if matrix.num_peers <= DENSE_LIMIT:
        w = matrix.dense()
        eigenvalues = averaging_rate * np.linalg.eigvalsh((w + w.T) / 2.0) + 1.0 - averaging_rate
    else:
        # The sum grows towards both ends of the spectrum, so those decide.
        ends = disagreement_eigenvalues(matrix)[[0, -1]]
        eigenvalues = averaging_rate * ends + 1.0 - averaging_rate
    worst = 0.0
    for eigenvalue in eigenvalues[eigenvalues < 1.0 - 1e-12]:
        if eigenvalue <= -1.0 / 3.0 + 1e-6:
            raise ConfigError(
                f"D² does not converge with the eigenvalue {eigenvalue:.4f} of the averaging",
                key="algorithm.averaging_rate",
                value=averaging_rate,
                valid="0.5, which keeps every eigenvalue above −1/3",
            )
        before, response, total = 0.0, float(eigenvalue), abs(float(eigenvalue))
        for _ in range(1_000_000):
            before, response = response, float(eigenvalue) * (2.0 * response - before)
            total += abs(response)
            if abs(response) + abs(before) < 1e-9 * total:
                break
        worst = max(worst, total)
    return worst


@lru_cache(maxsize=_KEPT)
def pairwise_mixing_time(matrix: MixingMatrix) -> float:
    """Return an estimate of t_mix of AD-PSGD, in exchanges over the whole graph.

    If a random peer averages with a random neighbour, E‖X_{k+1} − X̄‖² is at most λ₂ E‖X_k − X̄‖², λ₂ the second
    eigenvalue of the expected exchange matrix; ‖·‖₁ ≤ √n ‖·‖₂ then falls to ½ within 2 ln(2 √n) / ln(1/λ₂) exchanges.
    """
    n = matrix.num_peers
    if n < 2:
        return 1.0
    if n <= DENSE_LIMIT:
        w = matrix.dense()
        edges = (w + w.T > 0.0) & ~np.eye(n, dtype=bool)
        chance = edges / np.maximum(edges.sum(axis=1, keepdims=True), 1) / n
        pairs = (chance + chance.T) / 2.0
        expected = np.eye(n) - np.diag(pairs.sum(axis=1)) + pairs
        second = float(np.linalg.eigvalsh(expected)[-2])
    else:
        second = float(disagreement_eigenvalues(exchange_matrix(matrix))[-1])
    if second >= 1.0 - 1e-12:
        raise ConfigError("the graph is not connected, so its models can never mix; add edges", key="graph.kind")
    return 1.0 if second <= 0.0 else max(1.0, 2.0 * math.log(2.0 * math.sqrt(n)) / math.log(1.0 / second))


def exchange_matrix(matrix: MixingMatrix) -> MixingMatrix:
    """Return the mean of one exchange, in which a random peer averages with a random neighbour of either direction."""
    n = matrix.num_peers
    off = matrix.column_senders != matrix.column_receivers
    senders, receivers = matrix.column_senders[off], matrix.column_receivers[off]
    both = np.unique(np.concatenate([senders * n + receivers, receivers * n + senders]))
    one, other = np.divmod(both, n)
    degrees = np.maximum(np.bincount(one, minlength=n), 1)
    weights = (1.0 / degrees[one] + 1.0 / degrees[other]) / (2.0 * n)
    peers = np.arange(n)
    kept = 1.0 - np.bincount(one, weights=weights, minlength=n)
    return MixingMatrix(
        n, np.concatenate([one, peers]), np.concatenate([other, peers]), np.concatenate([weights, kept])
    )


def largest_stable_rate(bits: int, rounding: Rounding, *, halfway: bool = False) -> float:
    """Return the largest averaging rate at which an adapted θ does not feed on the code's own error; 0 for none.

    The distances that a round adds grow with η times the error of a code, which is a fixed part of θ. If that is more
    than θ shrinks by, θ and the distances drive each other up without bound. Measured on rings, complete, path and
    random graphs with noisy gradients and layers of 300 numbers: stable up to η = 0.12 / s, at any η for s up to 0.14
    (3 bits), s the standard deviation of the error over θ. `halfway`: the same for D² and for pairs, stable at any rate
    or none.
    """
    return _rate(bits, rounding, 0.0 if halfway else 0.12)


def resting_rate(bits: int, rounding: Rounding) -> float:
    """Return an averaging rate at which an adapted θ comes to rest in layers of any size, half the largest stable one.

    The largest of many errors is larger than that of a few. In layers of 20,000 numbers (ring of 8, 2-bit codes), θ
    doubles every 50 rounds at η = 0.12 / s, and rests at 0.08 / s and below; with 1 bit, after 200 rounds, it is 1.4
    times as large at 0.12 / s as at 0.06 / s. A ResNet-20 with 2-bit codes on CIFAR-10 at 16×16 (skew 0.8, 250 rounds,
    worst peer): 27.0 % at 0.12 / s, with models 0.4 apart in every parameter, and 43.3 % at 0.06 / s.
    """
    return _rate(bits, rounding, 0.06)


def _rate(bits: int, rounding: Rounding, per_error: float) -> float:
    d = delta(bits, rounding)
    s = 2.0 * d / (1.0 - 2.0 * d) / math.sqrt(6.0 if rounding is Rounding.STOCHASTIC else 3.0)
    return 1.0 if s <= 0.14 else min(1.0, per_error / s)


def refuse_unstable(code: Modulo, averaging_rate: float, *, halfway: bool = False) -> None:
    """Raise ConfigError if adapting θ would not come to rest (see `largest_stable_rate`)."""
    limit = largest_stable_rate(code.bits, code.rounding, halfway=halfway)
    if averaging_rate > limit:
        few = f"{code.bits} bits with {code.rounding.name.lower()} rounding"
        raise ConfigError(
            f"with {few}, the error of the code makes an adaptive θ grow without bound",
            key="compressor.bits",
            value=code.bits,
            valid="3 or more" if halfway else f"3 or more, or an averaging_rate of at most {limit:.2f}",
        )


class ThetaControl:
    """θ of every layer of one peer's own codes.

    In verified mode it depends on decoded values, never on the time of a request: distance is symmetric, so the
    distances that a peer measures as receiver are those that its receivers will meet. The neighbours' θ count as well
    (they travel in the frames): a peer that found a θ too small raises its own, and the others follow in the next
    round.
    """

    def __init__(self, mode: ThetaMode, given: tuple[float, ...], num_layers: int, hold_rounds: int = 1) -> None:
        """`given` is a constant or schedule; in verified mode its first entry is the first θ."""
        if mode not in MODES:
            raise ConfigError("unknown way to choose θ", key="algorithm.theta", value=mode, valid=", ".join(MODES))
        if mode != "theorem" and not given:
            raise ConfigError("needs a value", key="algorithm.theta_value", valid="a number above 0")
        if any(not (math.isfinite(theta) and theta > 0.0) for theta in given):
            raise ConfigError("must be above 0", key="algorithm.theta_value", value=given)
        self.mode = mode
        self._given = given
        self._hold_rounds = hold_rounds
        self._adapted = np.full(num_layers, given[0] if given else 1.0)
        self._largest = np.zeros(num_layers)
        """The largest distance since θ could last fall."""
        self.gradient_bound = 0.0
        """G∞: the largest magnitude so far of what any peer adds to x, without γ, as far as this one has heard."""
        self._unit = 0.0

    def thetas(self, t: int, unit: float, floors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return θ of every layer in round t. `unit` is the theorem's bound for G∞ = 1; `floors` are the least θ that
        the float type allows."""
        if self.mode == "constant":
            return np.full_like(self._adapted, self._given[min(t, len(self._given) - 1)])
        self._unit = unit
        bound = unit * self.gradient_bound
        if self._hold_rounds > 1:
            floors = np.exp2(np.ceil(np.log2(floors)))  # They follow the weights, which change in every round.
        # Before the first gradient a theorem says nothing.
        return np.maximum(floors, bound if self.mode == "theorem" and bound > 0.0 else self._adapted)

    def shared(self, t: int) -> float | None:
        """Return the θ of all peers and layers in round t; None if each chooses its own."""
        return self._given[min(t, len(self._given) - 1)] if self.mode == "constant" else None

    def see_gradient(self, largest: float) -> None:
        """Note max|G| of a round."""
        self.gradient_bound = max(self.gradient_bound, largest)

    def after_round(
        self,
        t: int,
        used: npt.NDArray[np.float64],
        distances: npt.NDArray[np.float64],
        heard: npt.NDArray[np.float64],
        violated: npt.NDArray[np.float64],
    ) -> None:
        """Adapt θ after round `t`. All float64[num_layers]: the own θ of the round, the largest distance measured
        (without the code's own error), the largest θ heard, and the largest θ found too small (0 if none was).

        In theorem mode the θ heard tell the neighbours' G∞, which spreads the largest of all peers.
        """
        if self.mode == "constant":
            return
        if self.mode == "theorem":
            if self._unit > 0.0 and self.gradient_bound > 0.0:
                self.see_gradient(float(heard.max()) / self._unit)
            return
        np.maximum(self._largest, distances, out=self._largest)
        if (t + 1) % self._hold_rounds == 0:
            slow = SHRINK**self._hold_rounds * np.maximum(used, heard)
            needed = np.maximum(SAFETY * self._largest, slow)
            self._largest[:] = 0.0
        else:
            needed = np.where(heard > KEEP * used, heard, used)
            needed = np.where(KEEP * distances > needed, SAFETY * distances, needed)
        self._adapted = np.maximum(needed, GROWTH * violated)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return θ and what it depends on, as named arrays."""
        state = {"theta": self._adapted, "gradient_bound": np.array([self.gradient_bound])}
        return {**state, "largest_distance": self._largest} if self._hold_rounds > 1 else state

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a result of `state`."""
        if state["theta"].shape != self._adapted.shape:
            raise ValueError(f"the saved θ has {state['theta'].size} layers, not {self._adapted.size}")
        self._adapted = np.array(state["theta"], np.float64)
        self.gradient_bound = float(state["gradient_bound"][0])
        if self._hold_rounds > 1:
            self._largest = np.array(state["largest_distance"], np.float64)
