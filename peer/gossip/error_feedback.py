"""Error feedback: the compressor's error is kept and sent later. DeepSqueeze, Sparse-Push and SCSP.

With v = x̃ + δ a peer sends c = C[v] and keeps δ = v − c, both from the payload itself. The own term of the average is
c too, so that Σ x moves by the gradient steps only, for any C; δ is a memory of values not sent yet, not mass.

In bfloat16, v takes the place of δ for the time, so that v and δ are rounded, both stochastically: c + δ differs from
x̃ + δ of the round before by less than 2⁻⁷ (|v| + |δ|), and by 0 in the mean. Σ x is what it would be without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from peer.compress.decompress import add_kept_
from peer.compress.float_types import are_floats, change_, floats_of
from peer.compress.payload import FloatArray, Payload
from peer.gossip.base import Algorithm, AlgorithmSpec, Exchange, GraphNeed, Memory, Metrics, NodeContext
from peer.gossip.mixing import (
    HoldsBack,
    PushSum,
    add_scaled_,
    compress,
    gossip_exchange,
    local_step_rate,
    restored_like,
    whole,
)
from peer.gossip.plausibility import norm_of
from peer.random import Purpose, Stream, stream
from peer.wire.message import Message


def compress_with_memory_(algorithm: DeepSqueeze | SparsePush, t: int) -> Payload:
    """Return C[x + δ] and leave v − C[v] in the error memory: δ ← v − c. Of a v that would reach too far, a share is
    compressed."""
    error_memory, number, x = algorithm.error_memory, algorithm.x.dtype.type, algorithm.x
    change_(error_memory, lambda v, part: np.add(v, x[part], out=v), algorithm.rounding(t, 0))
    share = number(algorithm.reaches.share_within(t, None, lambda: floats_of(error_memory) / number(algorithm.u)))
    payload = compress(algorithm.node, t, error_memory if share == 1.0 else share * floats_of(error_memory))
    add_kept_(error_memory, payload, algorithm.node.layout, algorithm.rounding(t, 1), -1.0)
    return payload


class ErrorFeedback(Algorithm):
    """Common part of the algorithms with an error memory δ."""

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        super().__init__(node, x0)
        self.error_memory = node.kept_zeros(self.x)
        """float[n] or bfloat16[n]"""

    def rounding(self, t: int, stage: int, first: int = 0) -> Stream:
        """Return the random words that round what changes the error memory in round t for the stage-th time, those of
        layer `first`. Only a memory in bfloat16 is rounded by them."""
        return stream(self.node.seed, self.node.peer, Purpose.MEMORY, t, (stage << 24) + first)

    def metrics(self) -> Metrics:
        memory = self.error_memory
        norm = float(np.linalg.norm(memory)) if are_floats(memory) else norm_of(memory)
        return replace(super().metrics(), error_norm=norm)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return {**super().state(), "error_memory": self.error_memory}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        super().restore(state)
        self.error_memory = restored_like(self.error_memory, state["error_memory"])


class DeepSqueeze(HoldsBack, ErrorFeedback):
    """x̃ = x − γ g(x); c = C[x̃ + δ]; δ ← x̃ + δ − c; x ← x̃ + η Σ_j (W_ij − I_ij) c_j.

    Tang et al. 2019 (DeepSqueeze); Algorithm 2 in the supplement of the low-precision paper.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="deep-squeeze",
        summary="Compressed models with error feedback on undirected graphs.",
        source="Tang et al. 2019, DeepSqueeze; Aketi et al. 2021, low precision training, Algorithm 2",
        graph=GraphNeed.DOUBLY,
        compresses=True,
        tolerates_late=True,
        time_varying=True,
        changes_members=True,
        memory=Memory.ERRORS,
    )

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        add_scaled_(self.x, -rate, gradient)
        self._t, self._own = t, compress_with_memory_(self, t)
        return gossip_exchange(self.node, t, self._own)


class SparsePush(PushSum, ErrorFeedback):
    """DeepSqueeze with gradients at z = x / u and push-sum weights: u ← u + η Σ_j (W_ij − I_ij) u_j.

    Aketi et al. 2021, Sparse-Push, Algorithm 1. Sends to the receivers of the round only, so that the graph may change
    at will. Invariants as for SGP.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="sparse-push",
        summary="Compressed push-sum with error feedback, for directed graphs that may change in every round.",
        source="Aketi et al. 2021, Sparse-Push, Algorithm 1",
        graph=GraphNeed.COLUMN,
        push_sum=True,
        compresses=True,
        may_send_nothing=True,
        tolerates_late=True,
        time_varying=True,
        changes_members=True,
        memory=Memory.ERRORS,
    )

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        add_scaled_(self.x, -local_step_rate(rate, self.u, self.node.push_weight_guard), gradient)
        return self._send(t, compress_with_memory_(self, t))

    def shrunk_(self, scale: float) -> None:
        number = self.x.dtype.type(scale)
        change_(self.error_memory, lambda v, _: np.multiply(v, number, out=v), self.rounding(max(self._t, 0), 2))


class Scsp(SparsePush):
    """Sparse-Push whose last `final_rounds` of `rounds` are gossip only, in full precision and at rate 1.

    Aketi et al. 2021, Skew-Compensated Sparse-Push, Algorithm 2: "full communication is far more vital towards the end
    of the training". These rounds have no gradient; t and the graphs run on. The first of them drops δ: models are sent
    whole from then on.
    """

    spec: ClassVar[AlgorithmSpec] = replace(
        SparsePush.spec,
        name="scsp",
        summary="Sparse-Push that ends with rounds of full-precision averaging, against skewed data.",
        source="Aketi et al. 2021, Sparse-Push, Algorithm 2",
        final_rounds=True,
    )

    def wants_gradient(self, t: int) -> bool:
        return t < self.node.rounds - self.node.final.count

    def averaging_rate(self, t: int) -> float:
        return self.node.averaging_rate if self.wants_gradient(t) else self.node.final.averaging_rate

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        if self.wants_gradient(t):
            return super().begin(t, gradient, rate)
        self.error_memory.fill(0)
        return self._send(t, whole(self.x.copy(), self.node.layout))

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        super().advance(inbox)
        if not self.wants_gradient(self._t):
            self._heard = dict(inbox)  # Whole models, so that the distance to the neighbours is known.
        return None


def final_rounds_for(distance: float, contraction: float, tolerance: float) -> int:
    """Return the number of final rounds that SCSP needs: the smallest k with contraction^k · distance ≤ tolerance.

    `distance` is the measured consensus distance, (1/n) Σ ‖z_i − z̄‖₂; `contraction` is ρ, by which one round of plain
    averaging shrinks it (1 − spectral gap, from 0 to below 1); `tolerance` is the distance that may remain. The paper
    uses 40 throughout; with its ring of four (ρ ≈ 0.71) that is a factor of 10⁶.
    """
    if not (0.0 <= contraction < 1.0 and tolerance > 0.0 and math.isfinite(distance)):
        raise ValueError("needs 0 ≤ contraction < 1, a tolerance above 0 and a finite distance")
    if distance <= tolerance:
        return 0
    if contraction == 0.0:
        return 1
    k = max(1, math.ceil(math.log(tolerance / distance) / math.log(contraction)))
    # The quotient of two logarithms may land on either side of a whole number.
    while contraction**k * distance > tolerance:
        k += 1
    while k > 1 and contraction ** (k - 1) * distance <= tolerance:
        k -= 1
    return k
