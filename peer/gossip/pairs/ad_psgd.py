"""AD-PSGD: the pair exchanges whole models."""

from __future__ import annotations

from typing import ClassVar

from peer.compress.base import compress_layers
from peer.compress.decompress import decompress_layers
from peer.compress.payload import FloatArray, Payload
from peer.gossip.base import AlgorithmSpec, GraphNeed
from peer.gossip.mixing import check_layers
from peer.gossip.moniqua import distances
from peer.gossip.pairs.coding import FurtherBits, PairCoding
from peer.gossip.pairs.node import PairNode
from peer.wire.message import Message, RepairWish


class WholeModels(PairCoding):
    """Sends x in full: x̂ is x, and nothing needs repair."""

    def code_request(self, x: FloatArray, number: int) -> Payload:
        node = self.node
        draws = node.draw_source.draws(number)
        return compress_layers(node.compressor, x, node.layout, draws, whole_below=node.whole_below)

    def code_reply(self, x: FloatArray, request: Message) -> Payload:
        return self.code_request(x, request.round)

    def check(self, message: Message) -> None:
        check_layers(message.layers, self.node.layout, message.sender)

    def read(self, message: Message, reference: FloatArray, further: FurtherBits) -> tuple[RepairWish, ...]:
        self.theirs = decompress_layers(message.layers, self.node.layout, reference.dtype)
        return ()

    def read_own(self, sent: Payload, reference: FloatArray, number: int) -> None:
        self.ours = decompress_layers(sent, self.node.layout, reference.dtype)

    def note_exchange(self, x: FloatArray, heard: Message, reference: FloatArray, violated: frozenset[int]) -> None:
        self.distance = distances(self.theirs, self.ours)[1] ** 0.5


class AdPsgd(PairNode):
    """x_i, x_j ← (x_i + x_j)/2, then x_i ← x_i − γ g, g computed at an earlier x_i, in full precision.

    Lian et al. 2017, Asynchronous Decentralized Parallel SGD, Algorithm 1. Invariant: Σ x moves by the gradient steps
    only, with what is in flight.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="ad-psgd",
        summary="No rounds: pairs of peers average while gradients are computed; no peer waits for slower ones.",
        source="Lian et al. 2017, AD-PSGD, Algorithm 1",
        graph=GraphNeed.SYMMETRIC,
        uses_averaging_rate=False,
        asynchronous=True,
    )
    coding_type = WholeModels
