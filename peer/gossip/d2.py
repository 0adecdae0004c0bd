"""D²: decentralized SGD whose memory of the last step cancels the differences between the peers' data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from peer.compress.payload import FloatArray
from peer.gossip.base import Algorithm, AlgorithmSpec, Exchange, GraphNeed, Memory, NodeContext
from peer.gossip.mixing import (
    add_neighbours_,
    add_scaled_,
    can_lose_peers,
    check_inbox,
    compress,
    gossip_exchange,
    keep_shares_,
    restored_like,
)
from peer.wire.message import Message


class LastStep(Algorithm):
    """Common part of D² and its form with modulo codes."""

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        super().__init__(node, x0)
        self.last_step = self.x.copy()
        """x₋₁ − γ₋₁ g₋₁: the two memories of D² enter as this difference only, so that one vector holds both."""

    def without(self, peer: int) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        """Begin again with a plain step."""
        np.copyto(self.last_step, self.x)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return {**super().state(), "last_step": self.last_step}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        super().restore(state)
        self.last_step = restored_like(self.x, state["last_step"])


class D2(LastStep):
    """h = 2x − x₋₁ − γ g(x) + γ₋₁ g₋₁; x ← Σ_j W̄_ij h_j, with W̄ = η W + (1 − η) I.

    Tang et al. 2018, D²: Decentralized Training over Decentralized Data, Algorithm 1. First round: x₋₁ = x₀ and
    γ₋₁ g₋₁ = 0, so that h = x₀ − γ g. Converges with any difference between the peers' data if W is symmetric and
    λ_min(W̄) > −1/3; η = ½ gives that on every graph.

    When the members change, it begins again with a plain step, h = x − γ g, as in its first round. The mean moves by −γ
    ḡ alone only if the mean of x − x₋₁ + γ₋₁ g₋₁ is zero. That holds for all members of the last round together, not
    for a part of them: a departed peer's share would be added again in every round. The memory must then be learned
    anew, and peers that are apart begin like peers with different x₀: their distance is one more term of the paper's
    bound, which decays like the others.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="d2",
        summary="D-PSGD with a memory of the last step: converges even when every peer has labels of its own.",
        source="Tang et al. 2018, D², Algorithm 1",
        graph=GraphNeed.SYMMETRIC,
        changes_members=True,
        memory=Memory.LAST_STEP,
        default_averaging_rate=0.5,
    )

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        self.x, self.last_step = half_step_(self, t, self.last_step, gradient, rate)
        self._t, self._own, self._heard = t, compress(self.node, t, self.x), {}
        return gossip_exchange(self.node, t, self._own)

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        node, t = self.node, self._t
        awaits = node.schedule.senders(t, node.peer)
        check_inbox(inbox, awaits, t, node.layout, may_lack=can_lose_peers(node))
        add_neighbours_(self.x, node, t, node.averaging_rate, self._own, inbox)
        keep_shares_(self.x, node, t, node.averaging_rate, self._own, set(awaits) - inbox.keys())
        self._heard = dict(inbox)
        return None


def half_step_(
    algorithm: Algorithm, t: int, last_step: FloatArray, gradient: FloatArray, rate: float
) -> tuple[FloatArray, FloatArray]:
    """Return (h, x − γ g), which replace (x, x₋₁ − γ₋₁ g₋₁). Both arrays are reused. Where h would reach too far, both
    the gradient and the rest of h − x are shortened, so that what a message has added is not added for ever."""
    x = algorithm.x
    last_step *= -1
    last_step += x
    if (share := algorithm.reaches.share_within(t, x, lambda: last_step - x.dtype.type(rate) * gradient)) < 1.0:
        last_step *= x.dtype.type(share)
        rate *= share
    add_scaled_(x, -rate, gradient)
    # x is x − γ g now, and last_step holds the rest of h: x − x₋₁ + γ₋₁ g₋₁.
    last_step += x
    return last_step, x
