"""Gossip that sends whole models: local training, D-PSGD and push-sum SGD (SGP).

They lose nothing themselves. With a compressor other than `none` (bfloat16 on the wire, say) both ends still count the
values as sent, so that the average of all models moves by the gradients alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from peer.compress.decompress import decompress_layers
from peer.compress.payload import FloatArray
from peer.gossip.base import Algorithm, AlgorithmSpec, Exchange, GraphNeed, in_sender_order
from peer.gossip.mixing import (
    HoldsBack,
    PushSum,
    add_scaled_,
    check_inbox,
    compress,
    gossip_exchange,
    local_step_rate,
)
from peer.gossip.options import RobustMixing
from peer.gossip.robust import add_robust_
from peer.wire.message import Message


class Local(Algorithm):
    """x ← x − γ g(x): every peer for itself, the baseline of no communication."""

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="local",
        summary="Every peer trains alone; the baseline that shows what communication is worth.",
        source="baseline",
        graph=GraphNeed.NONE,
        time_varying=True,
        uses_averaging_rate=False,
    )

    def hears(self, t: int, sender: int) -> bool:
        return False

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        add_scaled_(self.x, -rate, gradient)
        return Exchange({}, frozenset())

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        return None


class DPsgd(HoldsBack):
    """x ← x + η Σ_j (W_ij − I_ij) x_j − γ g(x), combine then adapt: the gradient is that at the old x.

    Lian et al. 2017 (D-PSGD), equation 4 of the Moniqua paper. Messages do not depend on the gradient, so that compute
    and communication can overlap. Invariant on doubly stochastic W: Σ x changes by the gradient steps only.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="d-psgd",
        summary="Averages whole models with the neighbours while the gradient is being computed.",
        source="Lian et al. 2017, D-PSGD, Algorithm 1",
        graph=GraphNeed.DOUBLY,
        tolerates_late=True,
        time_varying=True,
        changes_members=True,
        mixes_before_step=True,
        robust_mixing=True,
    )

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        self._t, self._own, self._heard = t, compress(self.node, t, self.x), {}
        add_scaled_(self.x, -rate, gradient)
        return gossip_exchange(self.node, t, self._own)

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        node, t = self.node, self._t
        if node.robust is None:
            super().advance(inbox)
        else:
            check_inbox(inbox, node.schedule.senders(t, node.peer), t, node.layout, may_lack=True)
            self._add_robust_(node.robust, inbox)
        self._heard = dict(inbox)
        return None

    def _add_robust_(self, rule: RobustMixing, inbox: Mapping[int, Message]) -> None:
        """Mix with the peers heard. In the difference form the weight of a lost peer stays here."""
        layout, dtype = self.node.layout, self.x.dtype
        heard = [
            (message.mixing_weight, decompress_layers(message.layers, layout, dtype))
            for message in in_sender_order(self.node.peer, inbox)
            if message is not None
        ]
        add_robust_(self.x, rule, self.node.averaging_rate, decompress_layers(self._own, layout, dtype), heard)


class Sgp(PushSum):
    """x̃ = x − γ g(z); x ← x̃ + η Σ_j (W_ij − I_ij) x̃_j; the same for u; z = x / u.

    Assran et al. 2019, Stochastic Gradient Push. Needs columns that sum to 1 and nothing of the rows, so that graphs
    may be directed and change. Invariants: Σ u = n and Σ x changes by the gradient steps only, with what is in
    flight.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="sgp",
        summary="Push-sum: whole models over directed graphs that may change in every round.",
        source="Assran et al. 2019, Stochastic Gradient Push, Algorithm 1",
        graph=GraphNeed.COLUMN,
        push_sum=True,
        may_send_nothing=True,
        tolerates_late=True,
        time_varying=True,
        changes_members=True,
        mixes_after_step=True,
    )

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        add_scaled_(self.x, -local_step_rate(rate, self.u, self.node.push_weight_guard), gradient)
        return self._send(t, compress(self.node, t, self.x))

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        super().advance(inbox)
        self._heard = dict(inbox)
        return None
