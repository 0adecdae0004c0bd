"""Moniqua's AD-PSGD: the pair exchanges modulo codes, a few bits a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from peer.compress.magnitude import max_magnitude
from peer.compress.payload import Dense, FloatArray, MoreBits, Payload, Residues, WholeIntegers
from peer.errors import RemoteProtocolError
from peer.gossip.base import AlgorithmSpec, GraphNeed, NodeContext
from peer.gossip.mixing import check_layers
from peer.gossip.moniqua import (
    check_codes,
    code_error,
    code_reach,
    coded,
    distances,
    modulo_compressor,
    recover_or_wish,
    repair_of,
    theta_control,
    theta_floors,
)
from peer.gossip.pairs.coding import FurtherBits, PairCoding
from peer.gossip.pairs.node import PairNode
from peer.gossip.theta import pairwise_mixing_time, refuse_unstable, theorem_5
from peer.wire.message import Message, RepairWish


class ModuloModels(PairCoding):
    """Sends modulo codes of x, each with the θ of its layer.

    In verified mode only a request can need repair: the responder knows its distance to the initiator by the time it
    answers, and chooses the θ of its reply accordingly.
    """

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        super().__init__(node, x0)
        self._compressor = modulo_compressor(node)
        self._theta = theta_control(node)
        if self._theta.mode == "verified":
            refuse_unstable(self._compressor, 0.5, halfway=True)
        self._rate = 0.0
        self._mixing_time = 1.0
        if self._theta.mode == "theorem":
            self._mixing_time = pairwise_mixing_time(node.schedule.at(0))

    def note_step(self, gradient: FloatArray, rate: float) -> None:
        self._rate = max(self._rate, rate)
        if self._theta.mode == "theorem":
            self._theta.see_gradient(max_magnitude(gradient))

    def code_request(self, x: FloatArray, number: int) -> Payload:
        return self._code(x, number, self._thetas(x, number))

    def code_reply(self, x: FloatArray, request: Message) -> Payload:
        if not self._compressor.verified:
            return self.code_request(x, request.round)
        # |x_j − x_i| ≤ |x_j − x̂_i| + δB, and some room for the rounding of these differences.
        epsilon = float(np.finfo(x.dtype).eps)
        bounds = [
            1.01
            * (distances(self.theirs[part], x[part])[0] + (code_error(sent) if isinstance(sent, Residues) else 0.0))
            + 8.0 * epsilon * max_magnitude(x[part])
            for part, sent in zip(self.node.layout.slices, request.layers, strict=True)
        ]
        return self._code(x, request.round, np.maximum(self._floors(x), bounds))

    def _code(self, x: FloatArray, number: int, thetas: npt.NDArray[np.float64]) -> Payload:
        return coded(self._compressor, x, self.node, self.node.draw_source.draws(number), thetas)

    def _thetas(self, x: FloatArray, number: int) -> npt.NDArray[np.float64]:
        return self._theta.thetas(number, theorem_5(self._rate, 1.0, self._mixing_time), self._floors(x))

    def _floors(self, x: FloatArray) -> npt.NDArray[np.float64]:
        return theta_floors(self._compressor, x, self.node.layout)

    def check(self, message: Message) -> None:
        check_layers(message.layers, self.node.layout, message.sender, modulo=True)
        check_codes(message, self.node, self._compressor, self._theta, self.theirs.dtype)

    def reach(self, message: Message) -> float:
        return code_reach(message, self._theta, self.node.peer)

    def read(self, message: Message, reference: FloatArray, further: FurtherBits) -> tuple[RepairWish, ...]:
        draws, wishes = self.node.draw_source.draws(message.round), []
        for layer, (part, sent) in enumerate(zip(self.node.layout.slices, message.layers, strict=True)):
            if isinstance(sent, Residues):
                omega = self._compressor.omega(reference[part], layer, draws)
                more = further.get(layer, [])
                out, verified = self.theirs[part], self._compressor.verified
                wish = recover_or_wish(sent, more, layer, reference[part], omega, out, verified, message.sender)
                if wish is not None:
                    wishes.append(wish)
            else:
                assert isinstance(sent, Dense)
                self.theirs[part] = sent.values
        return tuple(wishes)

    def read_own(self, sent: Payload, reference: FloatArray, number: int) -> None:
        draws = self.node.draw_source.draws(number)
        for layer, (part, payload) in enumerate(zip(self.node.layout.slices, sent, strict=True)):
            if isinstance(payload, Residues):
                omega = self._compressor.omega(reference[part], layer, draws)
                self._compressor.code.own_value(reference[part], payload.theta, omega, out=self.ours[part])
            else:
                self.ours[part] = reference[part]

    def note_exchange(self, x: FloatArray, heard: Message, reference: FloatArray, violated: frozenset[int]) -> None:
        num_layers = self.node.layout.num_layers
        measured, thetas = np.zeros(num_layers), np.zeros(num_layers)
        squares = 0.0
        for layer, (part, sent) in enumerate(zip(self.node.layout.slices, heard.layers, strict=True)):
            largest, layer_squares = distances(self.theirs[part], reference[part])
            squares += layer_squares
            if isinstance(sent, Residues):
                measured[layer], thetas[layer] = largest - code_error(sent), sent.theta
        self.distance = squares**0.5
        used = self._thetas(x, heard.round)
        self.largest_theta = float(used.max())
        too_small = np.zeros(num_layers)
        for layer in violated:
            too_small[layer] = max(thetas[layer], used[layer])
        self._theta.after_round(heard.round, used, measured, thetas, too_small)

    def repair_layer(
        self, wish: RepairWish, request: Message, sent: FloatArray, asker: int
    ) -> MoreBits | WholeIntegers:
        code = request.layers[wish.layer] if 0 <= wish.layer < self.node.layout.num_layers else None
        if not isinstance(code, Residues):
            raise RemoteProtocolError(f"asks to repair layer {wish.layer}, which was not coded", peer=asker)
        values = sent[self.node.layout.slices[wish.layer]]
        omega = self._compressor.omega(values, wish.layer, self.node.draw_source.draws(request.round))
        return repair_of(self._compressor, values, code.theta, omega, wish, asker)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return {**self._theta.state(), "rate": np.array([self._rate])}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self._theta.restore(state)
        self._rate = float(state["rate"][0])


class MoniquaAdPsgd(PairNode):
    """x_i ← x_i + ½ (x̂_j − x̂_i), the pair exchanging modulo codes: AD-PSGD in a few bits a number.

    Lu and De Sa 2020, Moniqua, section 5 and Theorem 5.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="moniqua-ad-psgd",
        summary="AD-PSGD with a few bits per number.",
        source="Lu and De Sa 2020, Moniqua, section 5 and Theorem 5",
        graph=GraphNeed.SYMMETRIC,
        compresses=True,
        modulo=True,
        uses_averaging_rate=False,
        asynchronous=True,
    )
    coding_type = ModuloModels
