"""The gossip step that the algorithms share: a peer's messages to its neighbours, and the weighted sum of theirs.

Every sum over neighbours runs in ascending sender index with the peer itself in its place, so that the result never
depends on the order of arrival. Weights are those that the senders told: column j of W is j's own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.compress.base import compress_layers
from peer.compress.columns import Columns
from peer.compress.decompress import add_all_decompressed_, add_decompressed_, add_dense_, decompress_layers
from peer.compress.float_types import KEPT_AT_ONCE, are_floats, floats_of, own_type
from peer.compress.layout import Layout
from peer.compress.payload import Dense, FloatArray, Kept, Payload, Residues, num_values
from peer.errors import LocalProtocolError, RemoteProtocolError
from peer.gossip.base import Algorithm, Exchange, NodeContext, in_sender_order
from peer.gossip.views import ViewSchedule
from peer.wire.message import Message, MessageKind

BLOCK = 1 << 15
"""Numbers handled at once by the passes over whole vectors: a block and its temporaries stay in the cache."""


def add_scaled_(out: FloatArray, scale: float, values: Kept) -> None:
    """Add `scale · values` to `out` in place, in the dtype of `out` and without a temporary of full size."""
    if are_floats(values):
        add_dense_(out, values, scale)
        return
    for start in range(0, out.size, KEPT_AT_ONCE):
        part = slice(start, start + KEPT_AT_ONCE)
        add_dense_(out[part], floats_of(values[part]), scale)


def distance(a: Kept, b: Kept, a_weight: float = 1.0, b_weight: float = 1.0) -> float:
    """Return ‖a / a_weight − b / b_weight‖₂ without a temporary of full size."""
    square = 0.0
    for start in range(0, a.size, BLOCK):
        ours, theirs = (floats_of(vector[start : start + BLOCK]) for vector in (a, b))
        number = ours.dtype.type
        difference = ours / number(a_weight)
        difference -= theirs / number(b_weight)
        square += float(np.dot(difference, difference))
    return math.sqrt(square)


def local_step_rate(rate: float, push_weight: float, guard: float) -> float:
    """Return γ scaled by min(1, u / guard); a guard of 0 leaves it.

    A peer that hears nobody loses u geometrically and its step in z = x / u is γ / u, which explodes.
    """
    return rate * min(1.0, push_weight / guard) if guard > 0.0 else rate


def debiased_step_rate(rate: float, push_weight: float, guard: float) -> float:
    """Return the part of a gradient by which z = x / u moves when x makes its step of `local_step_rate`."""
    return local_step_rate(rate, push_weight, guard) / push_weight


def compress(node: NodeContext, t: int, v: Kept | Iterable[FloatArray]) -> Payload:
    """Return `v` compressed by the node's compressor in round t, or its payload from before a crash. See
    `compress_layers`."""
    imposed = node.imposed.pop(t, None)
    if imposed is not None:
        return imposed
    return compress_layers(node.compressor, v, node.layout, node.draw_source.draws(t), whole_below=node.whole_below)


def whole(v: FloatArray, layout: Layout) -> Payload:
    """Return `v` as a payload that loses nothing, in the memory of `v`."""
    return tuple(Dense(v[part], own_type(v)) for part in layout.slices)


def whole_layer(values: FloatArray) -> Dense:
    """Return a copy of one layer as a payload that loses nothing."""
    return Dense(values.copy(), own_type(values))


def own_weight(node: NodeContext, t: int, left_out: Collection[int] = ()) -> float:
    """Return W_ii of round t, with the weights of the receivers that are left out."""
    schedule, me = node.schedule, node.peer
    return schedule.weight(t, me, me) + sum(schedule.weight(t, receiver, me) for receiver in sorted(left_out))


def gossip_messages(
    node: NodeContext,
    t: int,
    payload: Payload,
    *,
    receivers: Collection[int] | None = None,
    push_weight: float = 1.0,
    left_out: Collection[int] = (),
) -> dict[int, Message]:
    """Return the message of round t to each receiver (by default those of round t); all share the payload. Receivers
    that are left out are told so."""
    return {
        receiver: Message(MessageKind.NOTHING, node.peer, t)
        if receiver in left_out
        else Message(
            MessageKind.GOSSIP,
            node.peer,
            t,
            mixing_weight=node.schedule.weight(t, receiver, node.peer),
            push_weight=push_weight,
            layers=payload,
        )
        for receiver in (node.schedule.receivers(t, node.peer) if receivers is None else receivers)
    }


def gossip_exchange(
    node: NodeContext, t: int, payload: Payload, *, push_weight: float = 1.0, left_out: Collection[int] = ()
) -> Exchange:
    """Return the exchange of round t that tells its receivers the payload and hears its senders."""
    messages = gossip_messages(node, t, payload, push_weight=push_weight, left_out=left_out)
    return Exchange(messages, frozenset(node.schedule.senders(t, node.peer)))


def check_inbox(
    inbox: Mapping[int, Message],
    awaits: Collection[int],
    t: int,
    layout: Layout,
    *,
    may_lack: bool,
    modulo: bool = False,
) -> None:
    """Check everything that was received before any of it is applied, so that a refusal leaves the state as it was.

    Raises RemoteProtocolError naming the sender of an unusable message, and LocalProtocolError if the driver brought
    messages that were not asked for or left out indispensable ones.
    """
    unexpected, lacking = inbox.keys() - set(awaits), set(awaits) - inbox.keys()
    if unexpected or (lacking and not may_lack):
        raise LocalProtocolError(
            f"round {t}: messages of {sorted(unexpected)} not awaited, of {sorted(lacking)} lacking"
        )
    for sender, message in inbox.items():
        if message.sender != sender or message.round != t:
            raise LocalProtocolError(f"round {t}: the driver took {message} for a message of peer {sender}")
        check_message(message, layout, modulo=modulo)


def check_message(message: Message, layout: Layout, *, modulo: bool = False) -> None:
    """Raise RemoteProtocolError unless the message is a GOSSIP or NOTHING that fits the layout and the algorithm."""
    sender = message.sender
    if message.kind is MessageKind.NOTHING:
        return
    if message.kind is not MessageKind.GOSSIP:
        raise RemoteProtocolError(f"sent {message.kind.name} where a GOSSIP message was due", peer=sender)
    if not (0.0 <= message.mixing_weight <= 1.0 and 0.0 <= message.push_weight < np.inf):
        raise RemoteProtocolError(
            f"told the weights {message.mixing_weight} and {message.push_weight}, which no column of W can hold",
            peer=sender,
        )
    check_layers(message.layers, layout, sender, modulo=modulo)


def check_layers(layers: Payload, layout: Layout, sender: int, *, modulo: bool = False) -> None:
    """Raise RemoteProtocolError unless there is one layer of the right size and kind for each of the layout's."""
    if (
        isinstance(layers, Columns)
        and layers.fits(layout.size_array)
        and (layers.is_modulo if modulo else layers.residues is None)
    ):
        return
    if len(layers) != layout.num_layers:
        raise RemoteProtocolError(f"sent {len(layers)} layers, the model has {layout.num_layers}", peer=sender)
    for index, (layer, size) in enumerate(zip(layers, layout.sizes, strict=True)):
        if num_values(layer) != size:
            raise RemoteProtocolError(
                f"sent {num_values(layer)} numbers for layer {index}, which has {size}", peer=sender
            )
        usable = isinstance(layer, (Dense, Residues)) if modulo else not isinstance(layer, Residues)
        if not usable:
            raise RemoteProtocolError(f"sent {type(layer).__name__} where the algorithm cannot use it", peer=sender)


def can_lose_peers(node: NodeContext) -> bool:
    """Return whether a message may be missing although everybody is waited for: its sender may be lost for good."""
    return isinstance(node.schedule, ViewSchedule)


def other_members(node: NodeContext, t: int) -> tuple[int, ...]:
    """Return the other members of round t where all hear all; the weights of the graph have no say."""
    schedule, me = node.schedule, node.peer
    if isinstance(schedule, ViewSchedule):
        return schedule.senders(t, me)
    return tuple(peer for peer in range(schedule.num_peers) if peer != me)


def shares_of_mean(node: NodeContext, t: int) -> tuple[float, ...]:
    """Return the possible values of one peer's share in the mean over all members of round t."""
    schedule = node.schedule
    members = schedule.members(t)
    # A lost peer is missing from when each of the others heard of it.
    present = set(members) - (schedule.absent.keys() if isinstance(schedule, ViewSchedule) else set())
    return tuple(1.0 / num_peers for num_peers in range(len(present), len(members) + 1))


def add_neighbours_(
    x: FloatArray,
    node: NodeContext,
    t: int,
    rate: float,
    own: Payload,
    inbox: Mapping[int, Message],
    left_out: Collection[int] = (),
) -> None:
    """Add η Σ_j (W_ij − I_ij) c_j to `x` in place, where c_j is j's decompressed payload (`own` for j = i) and W_ii
    includes the weights of the receivers that are left out.

    The own term goes through the payload too ("apply what you sent"): the mass that leaves one peer is then exactly the
    mass that arrives at the others, and Σ x is conserved despite the compressor's error.
    """
    terms = [
        (own, rate * (own_weight(node, t, left_out) - 1.0))
        if message is None
        else (message.layers, rate * message.mixing_weight)
        for message in in_sender_order(node.peer, inbox)
    ]
    add_all_decompressed_(x, terms, node.layout)


def keep_shares_(x: FloatArray, node: NodeContext, t: int, rate: float, own: Payload, missing: Collection[int]) -> None:
    """Add η Σ_j W_ij c_i to `x` in place, over the senders j that are lost and were not heard: the weight of the
    missing edge stays with this end."""
    for sender in sorted(missing):
        add_decompressed_(x, own, node.layout, rate * node.schedule.weight(t, node.peer, sender))


def mixed_push_weight(
    u: float, node: NodeContext, t: int, rate: float, inbox: Mapping[int, Message], left_out: Collection[int] = ()
) -> float:
    """Return u + η Σ_j (W_ij − I_ij) u_j, where W_ii includes the weights of the receivers that are left out."""
    mixed = u
    for message in in_sender_order(node.peer, inbox):
        if message is None:
            mixed += rate * (own_weight(node, t, left_out) - 1.0) * u
        else:
            mixed += rate * message.mixing_weight * message.push_weight
    return mixed


def restored_like(x: Kept, saved: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy of a saved vector. Raises ValueError unless it has the shape and dtype of `x`."""
    if saved.shape != x.shape or saved.dtype != x.dtype:
        raise ValueError(f"a saved vector has shape {saved.shape} and type {saved.dtype}, not {x.shape} and {x.dtype}")
    return np.array(saved, copy=True)


class HeldBack:
    """Own values that a peer without push-sum weights keeps for neighbours that rounds went on without.

    Going on without j in round s takes the difference form for j: the peer puts η W_ij v_i(s) back for the time being,
    and when j's message comes it adds η W_ij (v_j(s) − v_i(s)). In the end it is as if j had been on time; until then
    the peer's own model is not pulled toward zero by the missing share.
    """

    def __init__(self) -> None:
        self._values: dict[int, Kept] = {}
        self._scales: dict[tuple[int, int], float] = {}

    def keep_(
        self, x: FloatArray, node: NodeContext, t: int, rate: float, missing: Collection[int], value: Kept
    ) -> None:
        """Add η W_ij v_i to `x` for every missing sender j and keep `value`, which is v_i of round t (copied)."""
        for sender in sorted(missing):
            self._scales[t, sender] = rate * node.schedule.weight(t, node.peer, sender)
            add_scaled_(x, self._scales[t, sender], value)
        if missing:
            self._values[t] = value.copy()

    def settle_(self, x: FloatArray, t: int, sender: int) -> None:
        """Take η W_ij v_i(t) out of `x` again, because the sender's message of round t has come."""
        if (t, sender) not in self._scales:
            raise LocalProtocolError(f"a late message of peer {sender}, round {t}, but nothing was held back for it")
        add_scaled_(x, -self._scales.pop((t, sender)), self._values[t])
        if all(held != t for held, _ in self._scales):
            del self._values[t]

    def forget(self, sender: int) -> None:
        """Leave the values put back for a sender: its messages will not come."""
        self._scales = {pair: scale for pair, scale in self._scales.items() if pair[1] != sender}
        self._values = {t: value for t, value in self._values.items() if any(held == t for held, _ in self._scales)}

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return the values held as arrays: none while nobody is late."""
        if not self._scales:
            return {}
        order = sorted(self._scales)
        return {
            "held.missing": np.array(order, np.int64),
            "held.scales": np.array([self._scales[pair] for pair in order]),
            **{f"held.{t}": value for t, value in sorted(self._values.items())},
        }

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a result of `state`."""
        self._scales, self._values = {}, {}
        if "held.missing" in state:
            pairs = [(int(t), int(sender)) for t, sender in state["held.missing"]]
            self._scales = dict(zip(pairs, map(float, state["held.scales"]), strict=True))
            self._values = {t: np.array(state[f"held.{t}"], copy=True) for t, _ in pairs}


class HoldsBack(Algorithm):
    """Common part of the algorithms that go on without late neighbours and have no push-sum weights."""

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        super().__init__(node, x0)
        self._held = HeldBack()

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        node, t = self.node, self._t
        awaits = node.schedule.senders(t, node.peer)
        check_inbox(inbox, awaits, t, node.layout, may_lack=True)
        add_neighbours_(self.x, node, t, node.averaging_rate, self._own, inbox)
        if missing := set(awaits) - inbox.keys():
            value = decompress_layers(self._own, node.layout, self.x.dtype)
            self._held.keep_(self.x, node, t, node.averaging_rate, missing, value)
        return None

    def absorb_late(self, message: Message) -> None:
        check_message(message, self.node.layout)
        self._held.settle_(self.x, message.round, message.sender)
        add_decompressed_(self.x, message.layers, self.node.layout, self.node.averaging_rate * message.mixing_weight)

    def without(self, peer: int) -> None:
        super().without(peer)
        self._held.forget(peer)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return {**super().state(), **self._held.state()}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        super().restore(state)
        self._held.restore(state)


class PushSum(Algorithm):
    """Common part of the algorithms with push-sum weights that send to the receivers of a round alone, all the same."""

    def averaging_rate(self, t: int) -> float:
        """Return η of round t."""
        return self.node.averaging_rate

    def _send(self, t: int, payload: Payload) -> Exchange:
        self._t, self._own, self._u_sent, self._heard = t, payload, self.u, {}
        return gossip_exchange(self.node, t, payload, push_weight=self.u, left_out=self.left_out)

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        node, t, rate = self.node, self._t, self.averaging_rate(self._t)
        check_inbox(inbox, node.schedule.senders(t, node.peer), t, node.layout, may_lack=True)
        add_neighbours_(self.x, node, t, rate, self._own, inbox, self.left_out)
        self.u = mixed_push_weight(self.u, node, t, rate, inbox, self.left_out)
        return None

    def absorb_late(self, message: Message) -> None:
        """Add η W_ij(s) c_j(s) and η W_ij(s) u_j(s) of an earlier round s, exactly as in that round."""
        check_message(message, self.node.layout)
        if message.kind is MessageKind.NOTHING:
            return
        scale = self.averaging_rate(message.round) * message.mixing_weight
        add_decompressed_(self.x, message.layers, self.node.layout, scale)
        self.u += scale * message.push_weight
