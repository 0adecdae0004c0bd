"""Direct quantization of the models exchanged: the algorithm whose failure the others avoid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from peer.compress.decompress import add_decompressed_
from peer.compress.payload import FloatArray
from peer.gossip.base import Algorithm, AlgorithmSpec, Exchange, GraphNeed, in_sender_order
from peer.gossip.mixing import (
    add_scaled_,
    can_lose_peers,
    check_inbox,
    compress,
    gossip_exchange,
    keep_shares_,
    own_weight,
)
from peer.wire.message import Message


class NaiveQuantized(Algorithm):
    """x ← W_ii x + Σ_{j≠i} W_ij C[x_j] − γ g(x).

    Equation 4 of the Moniqua paper. Its Theorem 1: with an unbiased grid of step Δ there is a quadratic on which
    E‖∇f(x_i)‖² ≥ φ²Δ² / (8 (1 + φ²)) for every round and step size, φ the smallest non-zero weight. The own term stays
    exact while the others' is quantized, so that Σ x is not conserved.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="naive-quantized",
        summary="D-PSGD on quantized models without any correction; stalls at a floor.",
        source="Lu and De Sa 2020, Moniqua, equation 4",
        graph=GraphNeed.DOUBLY,
        compresses=True,
        needs_unbiased=True,
        time_varying=True,
        changes_members=True,
        mixes_before_step=True,
        uses_averaging_rate=False,
        forgets_errors=True,
    )

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        self._t, self._own, self._heard = t, compress(self.node, t, self.x), {}
        self.x *= self.x.dtype.type(own_weight(self.node, t))
        add_scaled_(self.x, -rate, gradient)
        return gossip_exchange(self.node, t, self._own)

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        node, t = self.node, self._t
        awaits = node.schedule.senders(t, node.peer)
        check_inbox(inbox, awaits, t, node.layout, may_lack=can_lose_peers(node))
        keep_shares_(self.x, node, t, 1.0, self._own, set(awaits) - inbox.keys())
        for message in in_sender_order(node.peer, inbox):
            if message is not None:
                add_decompressed_(self.x, message.layers, node.layout, message.mixing_weight)
        self._heard = dict(inbox)
        return None
