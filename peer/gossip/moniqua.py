"""Moniqua: quantized gossip with no state beyond the model, because neighbours already know most of each other.

A peer sends only the low bits of the integers that its weights round to; a receiver whose own weights are within θ
knows the rest (`compress.modulo`). The own term of the average goes through the same code, which cancels the code's
error out of Σ x.

**Verified** mode, the default of the product, makes a wrong θ harmless: every layer carries 64 bits of hash over the
integers. A receiver that recovered others asks for further high bits of the *same* integers, at last for all of them,
until the hash fits. Nothing is quantized anew, so that the receiver adds, to the last bit, what the sender subtracts.
Between rounds only the numbers θ are state. The vector that the last codes came from is kept until every neighbour has
shown, by its next message, that it needs no repair; it belongs to the transport (`transport_state`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from peer.compress.base import Compressor, Draws
from peer.compress.columns import Columns
from peer.compress.layout import Layout
from peer.compress.magnitude import max_magnitude
from peer.compress.modulo import (
    MOST_KNOWN_BITS,
    Modulo,
    Omega,
    ThetaTooSmall,
    apply_repair,
    delta,
    hash_integers,
    largest_integer,
    modulus,
    more_bits,
    recover,
    recover_all,
    recover_checked,
    require_readable,
    theta_floor,
    values_of,
)
from peer.compress.payload import (
    Dense,
    FloatArray,
    LayerPayload,
    MoreBits,
    Payload,
    Residues,
    WholeIntegers,
)
from peer.compress.payload_norm import norm
from peer.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from peer.gossip.base import Algorithm, AlgorithmSpec, Exchange, GraphNeed, Memory, Metrics, NodeContext
from peer.gossip.d2 import LastStep, half_step_
from peer.gossip.mixing import (
    BLOCK,
    add_scaled_,
    can_lose_peers,
    check_inbox,
    gossip_exchange,
    own_weight,
    restored_like,
    whole_layer,
)
from peer.gossip.plausibility import HALF, OWN_MODEL, norm_of
from peer.gossip.theta import (
    HOLD_ROUNDS,
    ThetaControl,
    d2_constant,
    largest_stable_rate,
    refuse_unstable,
    second_eigenvalue,
    theorem_2,
    theorem_3,
    theorem_4,
)
from peer.wire.message import Message, MessageKind, RepairWish

THETAS = 4.0
"""So many times as far as models reach honest peers choose θ at most, which is twice the largest distance of two."""
FURTHER_BITS = (4, 8, 16, 0)
"""Further bits of K in the first, second, … request for a layer; 0, the last, asks for all of K."""


class _ModuloAlgorithm(Algorithm):
    """Common part of the algorithms whose exchange is Moniqua's code of a vector: sends codes, recovers others,
    asks for repairs, answers requests.

    A round has one phase, and one more for each repair that a neighbour's code needs. Neighbours may be a round ahead
    or behind, so that the sources of two rounds can be needed at once; between rounds it is one.
    """

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        super().__init__(node, x0)
        self._compressor = modulo_compressor(node)
        senders, receivers = node.schedule.all_senders(node.peer), node.schedule.all_receivers(node.peer)
        if node.modulo.verified and senders != receivers:
            raise ConfigError(
                "verified θ needs a graph with edges in both directions, because receivers request repairs",
                key="algorithm.theta",
                value="verified",
                valid="constant or theorem, or an undirected graph",
            )
        self.repairs = 0
        """Layers that had to be repaired so far."""
        self._sources: dict[int, Source] = {}
        self._spare: list[FloatArray] = []
        self._phase = 0
        self._is_imposed = False
        self.reference: FloatArray = np.zeros(0)
        self._messages: dict[int, Message] = {}
        self._to_add: list[int] = []
        self._further: dict[tuple[int, int], list[MoreBits | WholeIntegers]] = {}
        self._asked: dict[int, tuple[RepairWish, ...]] = {}
        layers = node.layout.num_layers
        self._distances, self._violated = np.zeros(layers), np.zeros(layers)
        self._thetas_heard = np.zeros(layers)
        self._neighbor_distances: list[float] = []
        self._theta = theta_control(node, hold_rounds=HOLD_ROUNDS)

    @cached_property
    def _scratch(self) -> FloatArray:
        """The vector to which codes are read."""
        return np.empty_like(self.x)

    def use_compressor(self, compressor: Compressor) -> None:
        """Use it from the next round on; repairs of earlier rounds keep theirs."""
        super().use_compressor(compressor)
        self._compressor = modulo_compressor(self.node)

    def _copy_of(self, values: FloatArray) -> FloatArray:
        """Return a copy, in the memory of a source that is no longer needed, if there is one."""
        if not self._spare:
            return values.copy()
        buffer = self._spare.pop()
        buffer[:] = values
        return buffer

    def _send(self, t: int, reference: FloatArray, unit: float) -> Exchange:
        """Send the codes of `reference`, which is kept and must not be written to until the next round is over."""
        node, compressor, theta = self.node, self._compressor, self._theta
        floors = theta_floors(compressor, reference, node.layout) if theta.mode != "constant" else np.zeros(0)
        thetas = theta.thetas(t, unit, floors)
        if theta.mode == "verified":
            thetas = np.minimum(thetas, THETAS * self.reaches.allowed(OWN_MODEL, share=HALF))
        draws = node.draw_source.draws(t)
        imposed = node.imposed.pop(t, None)
        self._is_imposed = imposed is not None
        at_once = None
        if imposed is None and node.whole_below == 0:
            at_once = compressor.compress_all(reference, node.layout, draws, thetas)
        self._own = imposed or at_once or coded(compressor, reference, node, draws, thetas)
        if imposed is not None:
            thetas = np.array([sent.theta if isinstance(sent, Residues) else 0.0 for sent in imposed])
        self._t, self._phase, self.reference = t, 0, reference
        self._sources[t] = Source(compressor, reference, thetas)
        self._further, self._asked = {}, {}
        self._distances[:], self._violated[:], self._thetas_heard[:] = 0.0, 0.0, 0.0
        self._neighbor_distances = []
        return gossip_exchange(node, t, self._own)

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        """Add Σ_j W̄_ij (x̂_j − x̂_i) to x, as far as the codes can be read; ask for repairs of the others."""
        self._keep_shares(self._take_codes(inbox) if self._phase == 0 else self._take_repairs(inbox))
        self._add_readable()
        if not self._to_add:
            self._finish()
            return None
        # All other repairs are asked for in the same phase.
        self._asked = {}
        for sender in self._to_add:
            if sender != self.node.peer and (wishes := self._recover(sender)):
                self._asked[sender] = tuple(wishes)
        self._phase += 1
        if self._phase == 1:
            self.repairs += sum(map(len, self._asked.values()))
        requests = {
            sender: Message(MessageKind.REPAIR_REQUEST, self.node.peer, self._t, phase=self._phase, wanted=wishes)
            for sender, wishes in self._asked.items()
        }
        return Exchange(requests, frozenset(requests), phase=self._phase)

    def _take_codes(self, inbox: Mapping[int, Message]) -> set[int]:
        """Take the codes of the round; return the senders that were lost before they sent one."""
        node, t = self.node, self._t
        awaits = node.schedule.senders(t, node.peer)
        check_inbox(inbox, awaits, t, node.layout, may_lack=can_lose_peers(node), modulo=True)
        for message in inbox.values():
            self.check_codes(message)
        self._messages = dict(inbox)
        self._to_add = sorted({*inbox, node.peer})
        # Every neighbour is in round t, hence through with t − 1: nobody will ask for that source again.
        for round_ in [r for r in self._sources if r < t]:
            self._retire(round_)
        return set(awaits) - inbox.keys()

    def check_codes(self, message: Message) -> None:
        """Raise RemoteProtocolError unless every code has this run's settings."""
        check_codes(message, self.node, self._compressor, self._theta, self.x.dtype, self.node.modulo.bits_between)

    def reach(self, message: Message, rate: float, receiver: int) -> float:
        reach = code_reach(message, self._theta, self.node.peer)
        return max(reach, norm_of(self.reference)) if message.sender == self.node.peer else reach

    def check_repair(self, repair: Message) -> None:
        """Raise RemoteProtocolError unless the phase under way asked the sender for this message."""
        wishes = self._asked.get(repair.sender, ())
        check_repair(repair, wishes, self._messages[repair.sender].layers if wishes else (), self.x.dtype)

    def _retire(self, round_: int) -> None:
        self._spare.append(self._sources.pop(round_).values)
        del self._spare[:-1]

    def _take_repairs(self, inbox: Mapping[int, Message]) -> set[int]:
        """Take the repairs asked for; return the senders that were lost before they answered: their codes cannot be
        read."""
        if inbox.keys() != self._asked.keys() and not (can_lose_peers(self.node) and inbox.keys() < self._asked.keys()):
            raise LocalProtocolError(f"round {self._t}: repairs of {sorted(inbox)}, asked {sorted(self._asked)}")
        for message in inbox.values():
            self.check_repair(message)
        for sender, message in inbox.items():
            for wish, layer in zip(self._asked[sender], message.layers, strict=True):
                assert isinstance(layer, (MoreBits, WholeIntegers))
                self._further.setdefault((sender, wish.layer), []).append(layer)
        lost = self._asked.keys() - inbox.keys()
        self._to_add = [sender for sender in self._to_add if sender not in lost]
        return lost

    def _keep_shares(self, lost: Collection[int]) -> None:
        """Add η W_ij x̂_i for senders j that are lost: the weight of the missing edge stays with this end."""
        if lost:
            self._recover_own()
        for sender in sorted(lost):
            weight = self.node.schedule.weight(self._t, self.node.peer, sender)
            add_scaled_(self.x, self.node.averaging_rate * weight, self._scratch)

    def _add_readable(self) -> None:
        """Add the senders' terms in ascending order, up to the first whose code cannot be read yet."""
        node, rate = self.node, self.node.averaging_rate
        while self._to_add:
            sender = self._to_add[0]
            if sender == node.peer:
                self._recover_own()
                weight = own_weight(node, self._t) - 1.0
            elif self._recover(sender):
                return
            else:
                self._measure(sender)
                weight = self._messages[sender].mixing_weight
            add_scaled_(self.x, rate * weight, self._scratch)
            self._to_add.pop(0)

    def _omega(self, layer: int, part: slice) -> Omega:
        draws = self.node.draw_source.draws(self._t)
        return self._compressor.omega(self.reference[part], layer, draws)

    def _recover_own(self) -> None:
        """Write x̂_i to the scratch vector, to the bit that of every receiver."""
        for layer, (part, sent) in enumerate(zip(self.node.layout.slices, self._own, strict=True)):
            if isinstance(sent, Residues) and self._is_imposed:
                # The reference may differ in its last bits from the one that was coded.
                recover(sent, self.reference[part], self._omega(layer, part), out=self._scratch[part])
            elif isinstance(sent, Residues):
                code = self._compressor.code
                code.own_value(self.reference[part], sent.theta, self._omega(layer, part), out=self._scratch[part])
            elif isinstance(sent, Dense):
                self._scratch[part] = sent.values

    def _recover(self, sender: int) -> list[RepairWish]:
        """Write x̂_j to the scratch vector and return wishes for the layers that cannot be read yet."""
        node, layers = self.node, self._messages[sender].layers
        draws, verified = node.draw_source.draws(self._t), self._compressor.verified
        if recover_all(layers, self.reference, node.layout, draws, self._scratch, verified=verified):
            return []
        wishes = []
        for layer, part in enumerate(node.layout.slices):
            sent, out, reference = self._messages[sender].layers[layer], self._scratch[part], self.reference[part]
            if isinstance(sent, Dense):
                out[:] = sent.values
                continue
            assert isinstance(sent, Residues)
            omega = self._omega(layer, part)
            further = self._further.get((sender, layer), [])
            try:
                wish = recover_or_wish(sent, further, layer, reference, omega, out, self._compressor.verified, sender)
            except ThetaTooSmall:
                # Nothing more can be asked for without a hash: like that of a lost peer, its share stays with this end.
                self._recover_own()
                return []
            if wish is not None:
                wishes.append(wish)
                self._violated[layer] = max(self._violated[layer], sent.theta)
        return wishes

    def _measure(self, sender: int) -> None:
        """Measure the distance of the sender's x̂, in the scratch vector, from the own reference; put the own x̂ there in
        the place of one that no honest peer has."""
        found = [distances(self._scratch[part], self.reference[part]) for part in self.node.layout.slices]
        far = math.sqrt(sum(layer_squares for _, layer_squares in found))
        if not self.reaches.lets_by(self._t, sender, self._scratch, self.reference, far):
            self._recover_own()  # Like that of a lost peer, its share stays with this end.
            return
        for layer, ((largest, _), sent) in enumerate(zip(found, self._messages[sender].layers, strict=True)):
            if isinstance(sent, Residues):
                self._distances[layer] = max(self._distances[layer], largest - code_error(sent))
                self._thetas_heard[layer] = max(self._thetas_heard[layer], sent.theta)
        self._neighbor_distances.append(far)

    def _finish(self) -> None:
        self._messages, used = {}, self._sources[self._t].thetas
        self._theta.after_round(self._t, used, self._distances, self._thetas_heard, self._violated)
        if not self._compressor.verified:
            self._retire(self._t)  # Nobody can ask for a repair.

    def answer(self, request: Message) -> Message:
        """Return the further bits of this or the last round's integers that a receiver asks for."""
        source = self._sources.get(request.round)
        if request.sender not in self.node.schedule.all_receivers(self.node.peer):
            raise RemoteProtocolError("asks for a repair but is no neighbour", peer=request.sender)
        if request.kind is not MessageKind.REPAIR_REQUEST or source is None or not request.wanted:
            raise RemoteProtocolError(f"asks to repair round {request.round}, which is over", peer=request.sender)
        draws, slices = self.node.draw_source.draws(request.round), self.node.layout.slices
        layers: list[LayerPayload] = []
        for wish in request.wanted:
            if not 0 <= wish.layer < len(slices):
                raise RemoteProtocolError(f"asks to repair layer {wish.layer}, which is none", peer=request.sender)
            values = source.values[slices[wish.layer]]
            if values.size < self.node.whole_below:
                raise RemoteProtocolError(f"asks to repair layer {wish.layer}, sent whole", peer=request.sender)
            omega = source.compressor.omega(values, wish.layer, draws)
            layers.append(
                repair_of(source.compressor, values, float(source.thetas[wish.layer]), omega, wish, request.sender)
            )
        return Message(
            MessageKind.REPAIR,
            self.node.peer,
            request.round,
            phase=request.phase,
            layers=tuple(layers),
            layer_ids=tuple(wish.layer for wish in request.wanted),
        )

    def metrics(self) -> Metrics:
        """Return the health figures of the last round."""
        measured = self._neighbor_distances
        used = [layer.theta for layer in self._own if isinstance(layer, Residues)]
        return Metrics(
            neighbor_distance=sum(measured) / len(measured) if measured else None,
            repairs=self.repairs,
            theta=max(used, default=None),
        )

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return, besides x, the count of repairs and θ, which alone outlive a round."""
        return {**super().state(), **self._theta.state(), "repairs": np.array([self.repairs], np.int64)}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        super().restore(state)
        self._theta.restore(state)
        self.repairs = int(state["repairs"][0])

    def transport_state(self) -> dict[str, npt.NDArray[Any]]:
        """Return the source of the last round's codes, for receivers that may still ask for a repair."""
        if not self._compressor.verified or not self._sources:
            return {}
        t = max(self._sources)
        source = self._sources[t]
        return {
            "round": np.array([t], np.int64),
            "bits": np.array([source.compressor.bits], np.int64),
            "values": source.values,
            "thetas": source.thetas,
        }

    def restore_transport(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self._sources.clear()
        if "round" in state:
            values, thetas = restored_like(self.x, state["values"]), np.array(state["thetas"], np.float64)
            compressor = replace(self._compressor, bits=int(state["bits"][0]))
            self._sources[int(state["round"][0])] = Source(compressor, values, thetas)


class Moniqua(_ModuloAlgorithm):
    """x ← x + Σ_j W̄_ij (x̂_j − x̂_i) − γ g(x), with W̄ = η W + (1 − η) I.

    Lu and De Sa 2020, Moniqua, Algorithm 1; with η < 1 the slack matrix of Theorem 3, which allows 1 bit. Invariant:
    Σ x moves by the gradient steps only, to rounding, whatever θ is (in verified mode also with far too small a θ).
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="moniqua",
        summary="D-PSGD with a few bits per number and without additional memory.",
        source="Lu and De Sa 2020, Moniqua, Algorithm 1 and Theorems 2 and 3",
        graph=GraphNeed.DOUBLY,
        compresses=True,
        mixes_before_step=True,
        modulo=True,
        changes_members=True,
    )

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        super().__init__(node, x0)
        if self._theta.mode == "verified":
            refuse_unstable(self._compressor, node.averaging_rate)
        self._rho = second_eigenvalue(node.schedule.at(0)) if self._theta.mode == "theorem" else 0.0

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        reference = self.x
        unit = 0.0
        if self._theta.mode == "theorem":
            self._theta.see_gradient(max_magnitude(gradient))
            unit = self._theorem(t, rate)
        self.x = self._copy_of(reference)
        add_scaled_(self.x, -rate, gradient)
        return self._send(t, reference, unit)

    def _theorem(self, t: int, rate: float) -> float:
        """Return θ of round t for G∞ = 1."""
        node, n = self.node, self.node.schedule.num_peers
        if node.averaging_rate < 1.0:
            return theorem_3(rate, 1.0, n, self._rho, node.averaging_rate)
        decays = node.modulo.step_size_decay
        return theorem_2(rate, 1.0, n, self._rho, decay=decays[min(t, len(decays) - 1)])


class MoniquaD2(LastStep, _ModuloAlgorithm):
    """h = 2x − x₋₁ − γ g(x) + γ₋₁ g₋₁; x ← h + Σ_j W̄_ij (ĥ_j − ĥ_i): D² whose exchange is Moniqua's code of h.

    Lu and De Sa 2020, Moniqua, section 5 and Theorem 4. θ bounds the distances between the h. See `D2`.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="moniqua-d2",
        summary="D² with a few bits per number.",
        source="Lu and De Sa 2020, Moniqua, section 5 and Theorem 4",
        graph=GraphNeed.SYMMETRIC,
        compresses=True,
        modulo=True,
        changes_members=True,
        memory=Memory.LAST_STEP,
        default_averaging_rate=0.5,
    )

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        super().__init__(node, x0)
        if self._theta.mode == "verified":
            refuse_unstable(self._compressor, node.averaging_rate, halfway=True)
        self._d1 = 0.0
        if self._theta.mode == "theorem":
            self._d1 = d2_constant(node.schedule.at(0), node.averaging_rate)

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        unit = 0.0
        if self._theta.mode == "theorem":
            self._theta.see_gradient(max_magnitude(gradient))
            unit = theorem_4(rate, 1.0, self.node.schedule.num_peers, self._d1)
        reference, self.last_step = half_step_(self, t, self.last_step, gradient, rate)
        self.x = self._copy_of(reference)
        return self._send(t, reference, unit)


def modulo_compressor(node: NodeContext) -> Modulo:
    """Return the node's compressor, carrying hashes exactly in verified mode. Raises ConfigError if it is another."""
    if not isinstance(node.compressor, Modulo):
        raise ConfigError(
            "a modulo algorithm needs the modulo compressor",
            key="compressor.kind",
            value=node.compressor.kind,
            valid="modulo",
        )
    return replace(node.compressor, verified=node.modulo.verified)


def theta_control(node: NodeContext, *, hold_rounds: int = 1) -> ThetaControl:
    """Return the node's way to choose θ; an adapted one may fall every `hold_rounds` rounds where codes are fine."""
    mode = node.modulo.theta_mode
    if mode == "verified" and not node.modulo.verified:
        raise ConfigError("an adaptive θ needs the hashes of verified mode", key="algorithm.theta", value=mode)
    code = modulo_compressor(node)
    # With so few bits that their own error drives the distances, θ has to follow those closely.
    fine = mode == "verified" and largest_stable_rate(code.bits, code.rounding) >= 1.0
    return ThetaControl(mode, node.modulo.theta, node.layout.num_layers, hold_rounds if fine else 1)


def theta_floors(code: Modulo, x: FloatArray, layout: Layout) -> npt.NDArray[np.float64]:
    """Return the least θ that the float type allows for each layer: float64[num_layers]."""
    floors = (theta_floor(max_magnitude(x[part]), code.bits, code.rounding, x.dtype) for part in layout.slices)
    return np.array(list(floors))


def coded(code: Modulo, x: FloatArray, node: NodeContext, draws: Draws, thetas: npt.NDArray[np.float64]) -> Payload:
    """Return the codes of x, layer by layer, each with its θ; small layers whole."""
    return tuple(
        whole_layer(x[part])
        if part.stop - part.start < node.whole_below
        else code.compress(x[part], layer, draws, theta=float(thetas[layer]))
        for layer, part in enumerate(node.layout.slices)
    )


@dataclass(frozen=True)
class Source:
    """Vector and settings from which the codes of one round came, kept for repairs."""

    compressor: Modulo
    values: FloatArray
    thetas: npt.NDArray[np.float64]


def recover_or_wish(
    sent: Residues,
    further: list[MoreBits | WholeIntegers],
    layer: int,
    reference: FloatArray,
    omega: Omega,
    out: FloatArray,
    verified: bool,
    sender: int,
) -> RepairWish | None:
    """Write x̂ of one layer to `out` and return None, or return the bits still needed to read it.

    Raises RemoteProtocolError if not even all of K fits the hash; without hashes, ThetaTooSmall.
    """
    if not verified:
        recover(sent, reference, omega, out=out)
        return None
    known = sent.bits + sum(more.bits for more in further if isinstance(more, MoreBits))
    try:
        if not further:
            _, right = recover_checked(sent, reference, omega, out=out)
        else:
            integers = apply_repair(sent, further, reference, omega)
            right = hash_integers(integers) == sent.check
            if right:
                values_of(sent, integers, omega, reference.dtype, out)
    except ThetaTooSmall:
        return RepairWish(layer, known, 0)
    if right:
        return None
    if further and isinstance(further[-1], WholeIntegers):
        raise RemoteProtocolError(f"the hash of layer {layer} does not belong to its integers", peer=sender)
    return RepairWish(layer, known, FURTHER_BITS[len(further)])


def check_codes(
    message: Message,
    node: NodeContext,
    own: Modulo,
    theta: ThetaControl,
    dtype: npt.DTypeLike,
    bits: tuple[int, int] | None = None,
) -> None:
    """Raise RemoteProtocolError unless just the layers that this run codes are codes, each of its settings. Numbers in
    the place of a code could be further from the receiver's than any code says. `bits`: see `check_code`."""
    shared = theta.shared(message.round)
    for number, (layer, size) in enumerate(_different(message.layers, node)):
        is_code = isinstance(layer, Residues)
        if is_code == (size < node.whole_below):
            form = "as a code, where all send it whole" if is_code else "whole, where all send a code"
            raise RemoteProtocolError(f"sent layer {number} {form}", peer=message.sender)
        if not isinstance(layer, Residues):
            continue
        check_code(own, layer, message.sender, bits)
        try:
            require_readable(layer, dtype)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(error.problem, peer=message.sender) from None
        if shared is not None and layer.theta != np.array(shared, dtype).item():
            raise RemoteProtocolError(
                f"sent a modulo code of θ = {layer.theta:g}, where all have {shared:g}", peer=message.sender
            )


def code_reach(message: Message, theta: ThetaControl, me: int) -> float:
    """Return the norm of what is sent whole, and a neighbour's θ / `THETAS` where peers measure what they need. What a
    code stands for is compared when it is read (`Reaches.lets_by`)."""
    codes = [layer for layer in message.layers if isinstance(layer, Residues) and theta.mode == "verified"]
    thetas = (layer.theta / THETAS for layer in codes if message.sender != me)
    return max(norm(message.layers), *thetas, 0.0)


def _different(layers: Payload, node: NodeContext) -> Iterable[tuple[LayerPayload, int]]:
    """Return the layers and their sizes; of columns that are codes throughout, a code without numbers for each θ."""
    if not isinstance(layers, Columns) or layers.residues is None or node.whole_below or layers.has_reals.any():
        return zip(layers, node.layout.sizes, strict=True)
    check = None if layers.checks is None else 0
    return [(Residues(theta, *layers.residues, layers.codes[:0], check), 1) for theta in set(layers.scalars.tolist())]


def check_code(own: Modulo, layer: Residues, sender: int, bits: tuple[int, int] | None = None) -> None:
    """Raise RemoteProtocolError unless the code has this run's settings.

    `bits` is the range in which every peer chooses the bits of its own codes, where a budget lets them.
    """
    low, high = bits or (own.bits, own.bits)
    right = low <= layer.bits <= high and layer.rounding is own.rounding
    if not right or (own.verified and layer.check is None):
        raise RemoteProtocolError("sent a modulo code of other settings than this run's", peer=sender)


def check_repair(repair: Message, wishes: Sequence[RepairWish], coded: Payload, dtype: npt.DTypeLike) -> None:
    """Raise RemoteProtocolError unless a repair fulfils the wishes. `coded`: the layers that its sender sent."""
    sender = repair.sender
    if repair.kind is not MessageKind.REPAIR or repair.layer_ids != tuple(wish.layer for wish in wishes):
        raise RemoteProtocolError("answered a request for repair with something else", peer=sender)
    for wish, layer in zip(wishes, repair.layers, strict=True):
        fits = isinstance(layer, WholeIntegers) or (
            wish.more_bits > 0
            and isinstance(layer, MoreBits)
            and (layer.low, layer.bits) == (wish.known_bits, wish.more_bits)
        )
        if not fits:
            raise RemoteProtocolError("answered a request for repair with other bits", peer=sender)
        if isinstance(layer, WholeIntegers):
            _check_integers(wish.layer, layer, coded[wish.layer], sender, dtype)


def _check_integers(number: int, layer: WholeIntegers, sent: LayerPayload, sender: int, dtype: npt.DTypeLike) -> None:
    """Raise RemoteProtocolError unless the code was made of this K: no further repair is asked for."""
    largest = max(-int(layer.integers.min(initial=0)), int(layer.integers.max(initial=0)))
    if largest > largest_integer(np.dtype(dtype)):
        raise RemoteProtocolError(f"sent layer {number} in integers up to {largest}", peer=sender)
    if not isinstance(sent, Residues) or hash_integers(layer.integers) != sent.check:
        raise RemoteProtocolError(f"the hash of layer {number} does not belong to its integers", peer=sender)


def repair_of(
    compressor: Modulo, values: FloatArray, theta: float, omega: Omega, wish: RepairWish, asker: int
) -> MoreBits | WholeIntegers:
    """Return the bits of K that a receiver wishes for. K is computed anew from its source, with the same result."""
    integers = compressor.code.encode(values, float(values.dtype.type(theta)), omega)
    if wish.more_bits == 0:
        return WholeIntegers(integers)
    if not (compressor.bits <= wish.known_bits <= MOST_KNOWN_BITS - wish.more_bits and 1 <= wish.more_bits <= 16):
        raise RemoteProtocolError(f"asks for {wish.more_bits} bits above {wish.known_bits}", peer=asker)
    return more_bits(integers, wish.known_bits, wish.more_bits)


def code_error(sent: Residues) -> float:
    """Return δ B, the largest error of a value recovered from this code."""
    return delta(sent.bits, sent.rounding) * modulus(sent.theta, sent.bits, sent.rounding)


def distances(a: FloatArray, b: FloatArray) -> tuple[float, float]:
    """Return (‖a − b‖∞, ‖a − b‖₂²)."""
    largest = squares = 0.0
    for start in range(0, a.size, BLOCK):
        difference = a[start : start + BLOCK] - b[start : start + BLOCK]
        squares += float(difference @ difference)
        largest = max(largest, float(difference.max()), -float(difference.min()))
    return largest, squares
