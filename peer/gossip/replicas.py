"""Replicas: peers send compressed differences, and all receivers of a peer keep a copy x̂ of it.

CHOCO-SGD, Quant-SGP, DCD-PSGD, ECD-PSGD. A copy is built from the payloads alone, by the same additions at the sender
and at every receiver, so that all copies of one peer are the same to the last bit. There is one copy for each
in-neighbour of the whole schedule rather than one running sum Σ_j W_ij x̂_j: it serves graphs that change and
messages that are late.

In bfloat16, copies take half of the memory. What a difference changes is rounded there by random bits that are a
function of the run's seed, the sender, the round and the number's place in the message, the same at all that keep the
copy. Rounded to nearest, a small difference would change nothing, and be chosen again for ever. The next difference
makes up for the rounding, which is one more error of C.

That the copies are the same is checked in every `CHECK_EVERY`-th round: their digests are compared, and a layer that
differs (a memory error, a bug, a state folder that was put back) is sent whole. No copy thus drifts unnoticed for
longer than that; models that were mixed with it in the meantime stay so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from peer import wire
from peer.compress.decompress import add_decompressed_, add_kept_
from peer.compress.float_types import are_floats, floats_of, store_
from peer.compress.magnitude import max_magnitude
from peer.compress.norms import sum_of_squares
from peer.compress.payload import Dense, FloatArray, Kept, Payload, WholeIntegers
from peer.compress.payload_norm import norm_at_most
from peer.errors import LocalProtocolError, RemoteProtocolError
from peer.gossip.base import (
    Algorithm,
    AlgorithmSpec,
    Exchange,
    GraphNeed,
    Memory,
    Metrics,
    NodeContext,
    in_sender_order,
    mean_distance,
)
from peer.gossip.drift import DriftCorrection
from peer.gossip.mixing import (
    HoldsBack,
    add_scaled_,
    can_lose_peers,
    check_inbox,
    check_message,
    compress,
    distance,
    gossip_messages,
    local_step_rate,
    mixed_push_weight,
    own_weight,
    restored_like,
    whole,
)
from peer.gossip.plausibility import UNUSUAL
from peer.gossip.robust import add_robust_
from peer.gossip.value_bounds import largest_value
from peer.gossip.views import ViewSchedule
from peer.random import Purpose, stream
from peer.wire.message import Message, MessageKind, RepairWish

CHECK_EVERY = 16
"""Rounds from one digest of copies to the next; it is taken after the difference of its round."""
LARGE = 1 << 22
"""Numbers of a vector that is compressed layer by layer rather than at once, to spare memory."""
_KEPT = "replica.kept."
"""Prefix of the round in the names of a state's arrays."""

Digests: TypeAlias = tuple[int, ...]
"""XXH3-64 of each layer of a replica."""


class Replicas:
    """The copies x̂_j that one peer keeps of itself and of everyone it ever hears."""

    def __init__(self, node: NodeContext, x0: FloatArray, *, starts_at_x0: bool) -> None:
        """Let every copy start at x₀, or at zeros, whose memory is not touched before a difference comes."""
        self._node = node
        self.senders = node.schedule.all_senders(node.peer)
        self.receivers = node.schedule.all_receivers(node.peer)
        self._shared = node.shared_copies

        def start() -> Kept:
            begun = node.kept_zeros(x0)
            if starts_at_x0:
                store_(begun, x0)
            return begun if self._shared is None else self._shared.start(begun)

        self.of: dict[int, Kept] = {j: start() for j in sorted({node.peer, *self.senders})}
        """Peer → its copy, float[n] or bfloat16[n]. Not to be written to where copies are shared (`_writable`)."""
        self._rounds: dict[int, int] = dict.fromkeys(self.senders, 0)
        self._own_rounds = 0
        """Number of differences that the own copy holds."""
        self._digests: dict[int, tuple[int, Digests]] = {}
        """Peer → (round, digests) of the last check of its copy."""
        self._whole: dict[int, Message] = {}
        """Sender → layers of its copy as it is after a difference that has not come yet."""
        self._kept: dict[int, Kept] = {}
        """Round → the own copy before the difference of that round, where it restarted or got other receivers then."""

    @property
    def own(self) -> Kept:
        """The copy that the others hold of this peer."""
        return self.of[self._node.peer]

    def messages(
        self, t: int, payload: Payload, push_weight: float = 1.0, left_out: Collection[int] = ()
    ) -> dict[int, Message]:
        """Return the messages of round t, one to each holder of a copy, even if its weight is 0 in this round, as for
        receivers left out."""
        messages = gossip_messages(self._node, t, payload, receivers=self.receivers, push_weight=push_weight)
        for receiver in left_out:
            messages[receiver] = replace(messages[receiver], mixing_weight=0.0)
        return messages

    def check(self, message: Message) -> None:
        """Raise unless the message is the next difference of its sender."""
        check_message(message, self._node.layout)
        if message.kind is MessageKind.NOTHING:
            raise RemoteProtocolError("sent NOTHING where others keep a copy of it", peer=message.sender)
        if message.round != self._rounds[message.sender]:
            raise LocalProtocolError(
                f"peer {message.sender}'s difference of round {message.round} came before that of round "
                f"{self._rounds[message.sender]}: late messages have to be absorbed first"
            )

    def apply_(self, message: Message, scale: float = 1.0, decay: float = 1.0) -> Kept:
        """Set x̂_j ← decay · x̂_j + scale · C_j for the sender j and return that copy."""
        sender = message.sender
        self._rounds[sender] = message.round + 1
        copy = self._add_(sender, message.round, message.layers, scale, decay)
        self._digest(sender, message.round)
        if sender in self._whole:
            self.take(self._whole.pop(sender))
        return copy

    def apply_own_(self, t: int, payload: Payload, scale: float = 1.0, decay: float = 1.0) -> Kept:
        """Change the own copy as every receiver changes its copy of this peer."""
        self._own_rounds = t + 1
        copy = self._add_(self._node.peer, t, payload, scale, decay)
        self._digest(self._node.peer, t)
        return copy

    # Agreement.

    def _digest(self, whose: int, t: int) -> None:
        if t % CHECK_EVERY:
            return
        copy = self.of[whose]

        def digests() -> Digests:
            return tuple(xxhash.xxh3_64_intdigest(copy[part].view(np.uint8).data) for part in self._node.layout.slices)

        if self._shared is None or copy.flags.writeable:
            self._digests[whose] = t, digests()
        else:
            self._digests[whose] = self._shared.check(whose, t, digests)

    @property
    def own_digests(self) -> tuple[int, Digests] | None:
        """(Round, digest of each layer) of the last check of the own copy, for others to `compare`; None before it."""
        return self._digests.get(self._node.peer)

    def compare(self, sender: int, round_: int, digests: Digests) -> tuple[int, ...] | None:
        """Return the layers in which the copy of `sender` differed from its own after its difference of that round;
        None if that check is still to come. Raises RemoteProtocolError for digests of another layout."""
        if sender not in self._rounds or len(digests) != self._node.layout.num_layers:
            raise RemoteProtocolError("sent digests of a replica that is not kept here", peer=sender)
        checked, ours = self._digests.get(sender, (-1, ()))
        if checked < round_:
            return None if round_ % CHECK_EVERY == 0 and self._rounds[sender] <= round_ else ()
        if checked > round_:
            return ()
        return tuple(layer for layer, pair in enumerate(zip(ours, digests, strict=True)) if pair[0] != pair[1])

    def whole(self, wanted: Sequence[RepairWish]) -> Message:
        """Return layers of the own copy as they are now, bit for bit: as the integers that their bits spell in
        float32."""
        found = (floats_of(self.own[self._node.layout.slices[wish.layer]]) for wish in wanted)
        layers = tuple(WholeIntegers(layer.view(np.int32).astype(np.int64)) for layer in found)
        ids = tuple(wish.layer for wish in wanted)
        return Message(MessageKind.REPAIR, self._node.peer, self._own_rounds, layers=layers, layer_ids=ids)

    def check_whole(self, message: Message) -> None:
        """Raise RemoteProtocolError unless these are layers of a copy that is kept here."""
        sender = message.sender
        if sender not in self._rounds or not message.layer_ids:
            raise RemoteProtocolError("sent a replica that is not kept here", peer=sender)
        for number, layer in zip(message.layer_ids, message.layers, strict=True):
            part = self._node.layout.slices[number]
            if not isinstance(layer, WholeIntegers) or layer.integers.size != part.stop - part.start:
                raise RemoteProtocolError(f"sent layer {number} of a replica in another form", peer=sender)
            values = _spelled(layer)
            if not max_magnitude(values) <= largest_value(values.dtype, self._node):
                raise RemoteProtocolError(
                    f"sent layer {number} of a replica with numbers up to {max_magnitude(values):g}", peer=sender
                )

    def take(self, message: Message) -> None:
        """Replace layers of a copy by those that its sender sent whole, once the differences before them have come;
        they are of no use once later ones have. To be checked before."""
        sender = message.sender
        if message.round > self._rounds[sender]:
            self._whole[sender] = message
        elif message.round == self._rounds[sender]:
            for number, layer in zip(message.layer_ids or (), message.layers, strict=True):
                assert isinstance(layer, WholeIntegers)
                store_(self._writable(sender)[self._node.layout.slices[number]], _spelled(layer))
            self._digests.pop(sender, None)

    # Edges that come and go (`gossip.boundary`).

    def change_edges(self, senders: Sequence[int], receivers: Sequence[int], t: int) -> None:
        """Keep copies of these senders and send to these receivers from round t on; a copy that is new is zero until
        `start_copy`."""
        self.senders, self.receivers = tuple(senders), tuple(receivers)
        self._rounds = {j: self._rounds.get(j, t) for j in senders}
        kept = sorted({self._node.peer, *senders})
        self.of = {j: self.of[j] if j in self.of else np.zeros_like(self.own) for j in kept}
        self._digests = {j: check for j, check in self._digests.items() if j in self.of}
        self._whole = {j: message for j, message in self._whole.items() if j in self.of}

    def restart_own(self, x: FloatArray, t: int) -> None:
        """Let the own copy be `x`, in bfloat16 to nearest, before the difference of round t: all receivers get it
        whole."""
        store_(self._writable(self._node.peer), x)
        self._own_rounds = t
        self._digests.pop(self._node.peer, None)

    def own_copy(self, t: int) -> Message:
        """Return the own copy as a message of round t that loses nothing."""
        layers = whole(floats_of(self.own.copy()), self._node.layout)
        return Message(MessageKind.GOSSIP, self._node.peer, t, layers=layers)

    def start_copy(self, message: Message) -> None:
        """Replace the copy by the sender's `own_copy`. Raises RemoteProtocolError."""
        values = np.concatenate([layer.values for layer in message.layers if isinstance(layer, Dense)])
        if values.size != self.own.size:
            raise RemoteProtocolError("sent a copy in another form than whole", peer=message.sender)
        store_(self._writable(message.sender), values)
        self._rounds[message.sender] = message.round + 1
        self._digests.pop(message.sender, None)

    def _add_(self, whose: int, t: int, payload: Payload, scale: float, decay: float) -> Kept:
        """Let a copy take the difference of round t; return it. In bfloat16 all that keep it round it alike."""

        def change_(copy: Kept) -> None:
            if decay != 1.0:
                assert are_floats(copy), "rounding would add up: `validate` refuses it"
                copy *= copy.dtype.type(decay)
            add_kept_(copy, payload, self._node.layout, stream(self._node.seed, whose, Purpose.COPY, t), scale)

        copy = self.of[whose]
        if copy.flags.writeable:
            change_(copy)
        else:
            assert self._shared is not None
            copy = self.of[whose] = self._shared.moved(whose, t + 1, copy, change_)
        return copy

    def _writable(self, whose: int) -> Kept:
        """Return a copy that this peer alone keeps from now on."""
        if not self.of[whose].flags.writeable:
            self.of[whose] = self.of[whose].copy()
        return self.of[whose]

    # Differences that a lost peer never had (`gossip.lost_peers`).

    @property
    def keeps_own(self) -> bool:
        """Whether a copy that `keep_own` kept is still here."""
        return bool(self._kept)

    def keep_own(self, t: int) -> None:
        """Keep the own copy as it is before the difference of round t, because it restarts or a former receiver gets no
        more differences."""
        self._kept.setdefault(t, self.own.copy())

    def forget_kept(self) -> None:
        """Forget the copies that `keep_own` kept: nothing sent before comes back any more."""
        self._kept.clear()

    def own_after(self, messages: Sequence[Message]) -> Iterator[tuple[Message, FloatArray]]:
        """Yield the own messages to one receiver, the newest first, each with the own copy right after it, valid until
        the next.

        `messages`: those of consecutive rounds, up to the newest of all or the last before a copy was kept. A copy is
        one that was kept, or that of the next round less the difference between them; in bfloat16, without what
        rounding added to the numbers of that difference, less than 2⁻⁷ of each and 0 in the mean.
        """
        copy, kept = floats_of(self.own.copy()), sorted(self._kept)
        for message in sorted(messages, key=lambda message: -message.round):
            while kept and kept[-1] > message.round:
                copy = floats_of(self._kept[kept.pop()].copy())
            yield message, copy
            add_decompressed_(copy, message.layers, self._node.layout, -1.0)

    def mean_distance(self, push_weights: Mapping[int, float]) -> float | None:
        """Return the mean over the given senders of ‖x̂_j / u_j − x̂_i / u_i‖₂, self left out of the mean."""
        u_own = push_weights[self._node.peer]
        distances = [
            distance(self.of[j], self.own, u, u_own)
            for j, u in sorted(push_weights.items())
            # A copy may be gone by the end of the round: its peer left or is lost.
            if j != self._node.peer and j in self.of and u > 0.0
        ]
        return mean_distance(self._node, distances)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return the copies as `replica.<peer>`, and the number of differences of each sender that they hold."""
        rounds = np.array([self._rounds[j] for j in self.senders], np.int64)
        waiting = {
            f"replica.whole.{j}": np.frombuffer(wire.encode(message, self._node.layout), np.uint8)
            for j, message in self._whole.items()
        }
        return {
            "replica.rounds": rounds,
            "replica.own_rounds": np.array([self._own_rounds], np.int64),
            **{f"replica.{j}": copy for j, copy in self.of.items()},
            **{f"{_KEPT}{t}": copy for t, copy in self._kept.items()},
            **waiting,
        }

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a result of `state`."""
        self._rounds = dict(zip(self.senders, map(int, state["replica.rounds"]), strict=True))
        self.of = {j: restored_like(copy, state[f"replica.{j}"]) for j, copy in self.of.items()}
        # States of the first release lack the number; it is that of the senders where nobody is late.
        self._own_rounds = int(state.get("replica.own_rounds", [max(self._rounds.values(), default=0)])[0])
        prefix = "replica.whole."
        self._whole = {
            int(name.removeprefix(prefix)): wire.decode(state[name].tobytes(), self._node.layout)
            for name in state
            if name.startswith(prefix)
        }
        # States of releases that kept nothing have none.
        kept = {int(name.removeprefix(_KEPT)): state[name] for name in state if name.startswith(_KEPT)}
        self._kept = {t: restored_like(self.own, copy) for t, copy in kept.items()}
        self._digests = {}


def _spelled(layer: WholeIntegers) -> npt.NDArray[np.float32]:
    """Return the numbers with the integers as their bits, float32[n]."""
    return layer.integers.astype(np.int32).view(np.float32)


class ReplicaAlgorithm(Algorithm):
    """Common part of the algorithms with replicas: the copies, their agreement and their state."""

    replicas: Replicas
    starts_at_x0: ClassVar[bool] = False
    """Whether copies start at x₀, in place of zeros."""

    def scales(self, t: int) -> tuple[float, float]:
        """Return what a difference of round t is multiplied by, and the copy before it is added."""
        return 1.0, 1.0

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        super().__init__(node, x0)
        self.replicas = Replicas(node, self.x, starts_at_x0=self.starts_at_x0)
        self._weights: dict[int, float] = {}

    @cached_property
    def _scratch(self) -> FloatArray:
        """A vector like x that no other call relies on."""
        shared = self.node.shared_copies
        return np.empty_like(self.x) if shared is None else shared.scratch(self.x)

    def hears(self, t: int, sender: int) -> bool:
        schedule, me = self.node.schedule, self.node.peer
        # All that ever hear it, even in rounds in which their weight is 0.
        if isinstance(schedule, ViewSchedule):
            return sender in schedule.senders_from(t, me)
        return sender in schedule.all_senders(me)

    def weights_from(self, t: int, sender: int) -> tuple[float, ...]:
        weights = super().weights_from(t, sender)
        return (*weights, 0.0) if self.spec.push_sum else weights  # It may leave receivers out.

    def reach(self, message: Message, rate: float, receiver: int) -> float:
        """Return how far a difference brings the copy; of layers that take the place of the copy's, their norm."""
        if message.kind is MessageKind.REPAIR:
            layers = (_spelled(layer) for layer in message.layers if isinstance(layer, WholeIntegers))
            return math.sqrt(sum(map(sum_of_squares, layers)))
        (scale, decay), sender = self.scales(message.round), message.sender
        # Small ones add up: now and then the copy is measured besides, as it is to be compared.
        may_be_free, copy = message.round % CHECK_EVERY > 0, self.replicas.of.get(sender)
        length = self._counted(scale * norm_at_most(message.layers), message.push_weight)
        if may_be_free and self.reaches.is_free(sender, length):
            return length
        length = scale * super().reach(message, rate, receiver)
        if copy is None or (may_be_free and self.reaches.is_free(sender, length)):
            return length
        if sender != self.node.peer:  # The own one holds the difference already.
            at_most = abs(decay) * self._reach_of(message, copy) + length
            if at_most <= self.reaches.allowed(sender, share=UNUSUAL):
                return at_most
            copy = floats_of(copy) * self.x.dtype.type(decay)
            add_decompressed_(copy, message.layers, self.node.layout, scale)
        return self._reach_of(message, copy)

    def _reach_of(self, message: Message, copy: Kept) -> float:
        square = sum(sum_of_squares(floats_of(copy[part])) for part in self.node.layout.slices)
        return self._counted(math.sqrt(square), message.push_weight)

    def check_repair(self, repair: Message) -> None:
        self.replicas.check_whole(repair)

    def _compress_difference_(self, t: int) -> Payload:
        """Return q = C[x̃ − x̂] and bring the own copy up to date with it: x̂ ← x̂ + q."""
        node, own, number = self.node, self.replicas.own, self.x.dtype.type
        share = number(self.reaches.share_within(t, own, lambda: self.x - floats_of(own)))
        if share < 1.0 or self.x.size < LARGE:
            difference = np.subtract(self.x, floats_of(own), out=self._scratch)
            payload = compress(node, t, difference if share == 1.0 else share * difference)
        else:
            # One layer after the other in the same memory.
            slices, room = node.layout.slices, np.empty(max(node.layout.sizes), self.x.dtype)
            layers = (np.subtract(self.x[p], floats_of(own[p]), out=room[: p.stop - p.start]) for p in slices)
            payload = compress(node, t, layers)
        self.replicas.apply_own_(t, payload)
        return payload

    def answer(self, request: Message) -> Message:
        if request.sender not in self.replicas.receivers or any(wish.more_bits for wish in request.wanted):
            raise RemoteProtocolError("asks for a replica that it does not keep", peer=request.sender)
        if not request.wanted:
            raise RemoteProtocolError("asks for no layer of a replica", peer=request.sender)
        return self.replicas.whole(request.wanted)

    def without(self, peer: int) -> None:
        """Send a lost peer nothing more and keep no copy of it."""
        senders = [j for j in self.replicas.senders if j != peer]
        receivers = [j for j in self.replicas.receivers if j != peer]
        self.replicas.change_edges(senders, receivers, 0)

    def metrics(self) -> Metrics:
        return Metrics(
            push_weight=self.u,
            replica_error=distance(self.x, self.replicas.own),
            neighbor_distance=self.replicas.mean_distance(self._weights) if self._weights else None,
        )

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return {**super().state(), **self.replicas.state()}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        super().restore(state)
        self.replicas.restore(state)


def _heard_weights(node: NodeContext, inbox: Mapping[int, Message], push_weight: float) -> dict[int, float]:
    """Return u_j of the senders that had a share in the round, and the own u."""
    heard = {j: message.push_weight for j, message in inbox.items() if message.mixing_weight > 0.0}
    return {**heard, node.peer: push_weight}


def replicas_of(algorithm: Algorithm) -> Replicas | None:
    """Return the replicas that an algorithm keeps; None for one without."""
    return algorithm.replicas if isinstance(algorithm, ReplicaAlgorithm) else None


class ChocoSgd(HoldsBack, ReplicaAlgorithm):
    """x̃ = x − γ g(x); q = C[x̃ − x̂]; x̂_j ← x̂_j + q_j for all heard; x ← x̃ + η Σ_j (W_ij − I_ij) x̂_j.

    Koloskova et al. 2019 (CHOCO-SGD); Algorithm 3 in the supplement of the low-precision paper, in the form that
    conserves Σ x on every column-stochastic W. The printed Σ_j (W_ij − I_ij)(x̂_j − x̂_i) equals it where rows sum to 1
    and loses mass where they do not.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="choco-sgd",
        summary="Compressed differences to replicas that the neighbours keep, on undirected graphs.",
        source="Koloskova et al. 2019, CHOCO-SGD; Aketi et al. 2021, low precision training, Algorithm 3",
        graph=GraphNeed.DOUBLY,
        compresses=True,
        tolerates_late=True,
        time_varying=True,
        changes_members=True,
        memory=Memory.REPLICAS,
        robust_mixing=True,
    )

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        add_scaled_(self.x, -rate, gradient)
        self._t = t
        payload = self._compress_difference_(t)
        return Exchange(self.replicas.messages(t, payload), frozenset(self.replicas.senders))

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        node, t, rate = self.node, self._t, self.node.averaging_rate
        check_inbox(inbox, self.replicas.senders, t, node.layout, may_lack=True)
        add_replicas_(self.x, node, t, rate, self.replicas, inbox)
        if node.robust is None:
            missing = set(self.replicas.senders) - inbox.keys()
            self._held.keep_(self.x, node, t, rate, missing, self.replicas.own)
        self._weights = _heard_weights(node, inbox, 1.0)
        return None

    def absorb_late(self, message: Message) -> None:
        self.replicas.check(message)
        self._held.settle_(self.x, message.round, message.sender)
        scale = self.node.averaging_rate * message.mixing_weight
        add_scaled_(self.x, scale, self.replicas.apply_(message))


class QuantSgp(ReplicaAlgorithm):
    """CHOCO-SGD with gradients at z = x / u and push-sum weights: u ← u + η Σ_j (W_ij − I_ij) u_j.

    Taheri et al. 2020; Algorithm 5 in the supplement of the low-precision paper, in the conserving form of `ChocoSgd`.
    On a changing graph, q goes to all peers that will ever need the copy, even in rounds in which their weight is 0. A
    late q_s contributes η W_ij(s) x̂_j(s), the copy right after it: with a stale copy Σ x would be lost while Σ u stays
    perfect. Invariants as for SGP.

    With drift correction (`drift`) g − s takes the place of g, and d = η Σ_j W_ij (x̂_j − (u_j / u_i) x̂_i), which
    leaves out the part that moves with weights. If all u are 1, Σ d = 0, so that Σ s stays 0.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="quant-sgp",
        summary="Compressed push-sum with replicas, for directed graphs; the most accurate at high compression.",
        source="Taheri et al. 2020; Aketi et al. 2021, low precision training, Algorithm 5",
        graph=GraphNeed.COLUMN,
        push_sum=True,
        compresses=True,
        tolerates_late=True,
        time_varying=True,
        changes_members=True,
        memory=Memory.REPLICAS,
        corrects_drift=True,
    )

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        super().__init__(node, x0)
        self._drift = None if node.drift_gain is None else DriftCorrection(self.x, node.drift_gain())

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        step = local_step_rate(rate, self.u, self.node.push_weight_guard)
        add_scaled_(self.x, -step, gradient)
        if self._drift is not None:
            self._drift.step_(self.x, step)
        self._t = t
        payload = self._compress_difference_(t)
        messages = self.replicas.messages(t, payload, self.u, self.left_out)
        return Exchange(messages, frozenset(self.replicas.senders))

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        node, t, rate = self.node, self._t, self.node.averaging_rate
        check_inbox(inbox, self.replicas.senders, t, node.layout, may_lack=True)
        self._weights = _heard_weights(node, inbox, self.u)
        u = mixed_push_weight(self.u, node, t, rate, inbox, self.left_out)
        if self._drift is None:
            add_replicas_(self.x, node, t, rate, self.replicas, inbox, self.left_out)
        else:
            movement = self._scratch
            movement.fill(0)
            add_replicas_(movement, node, t, rate, self.replicas, inbox, self.left_out)
            self.x += movement
            self._drift.learn_(movement)
            if u != self.u and self.u > 0.0:
                # Left out of d: mass that came or went with weight is that much of the own model.
                self._drift.learn_(self.replicas.own, -(u - self.u) / self.u)
        self.u = u
        return None

    def absorb_late(self, message: Message) -> None:
        self.replicas.check(message)
        scale = self.node.averaging_rate * message.mixing_weight
        copy = self.replicas.apply_(message)
        if scale > 0.0:
            add_scaled_(self.x, scale, copy)
            self.u += scale * message.push_weight

    def start_anew(self) -> None:
        if self._drift is not None and self.node.drift_gain is not None:
            self._drift.reset(self.node.drift_gain())

    def take_back(self, unreceived: Sequence[Message]) -> None:
        """Add η W x̂(s) and η W u(s) of each round s."""
        for message, copy in self.replicas.own_after(unreceived):
            scale = self.node.averaging_rate * message.mixing_weight
            add_scaled_(self.x, scale, copy)
            self.u += scale * message.push_weight

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return {**super().state(), **({} if self._drift is None else self._drift.state())}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        super().restore(state)
        if self._drift is not None:
            self._drift.restore(state)


def add_replicas_(
    x: FloatArray,
    node: NodeContext,
    t: int,
    rate: float,
    replicas: Replicas,
    inbox: Mapping[int, Message],
    left_out: Collection[int] = (),
) -> None:
    """Bring the copies of all senders up to date, then add η Σ_j (W_ij − I_ij) x̂_j to `x` in place, where W_ii
    includes the weights of the receivers that are left out; or what `robust` makes of the copies."""
    for received in inbox.values():
        replicas.check(received)
    if node.robust is not None:
        copies = {sender: replicas.apply_(inbox[sender]) for sender in sorted(inbox)}
        heard = [(inbox[j].mixing_weight, copy) for j, copy in copies.items() if inbox[j].mixing_weight > 0.0]
        add_robust_(x, node.robust, rate, replicas.own, heard)
        return
    for message in in_sender_order(node.peer, inbox):
        if message is None:
            add_scaled_(x, rate * (own_weight(node, t, left_out) - 1.0), replicas.own)
            continue
        copy = replicas.apply_(message)
        if message.mixing_weight > 0.0:
            add_scaled_(x, rate * message.mixing_weight, copy)


class DcdPsgd(ReplicaAlgorithm):
    """h = Σ_j W_ij x̂_j − γ g(x); x ← x + C[h − x]; every copy follows by the same difference, so that x̂_j = x_j.

    Tang et al. 2018, difference compression (DCD-PSGD). Copies start at x₀. The error of C enters x itself, unbiased
    and uncorrected: good for mild compression only. So does the rounding of copies in bfloat16, whose numbers x has.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="dcd-psgd",
        summary="D-PSGD whose every step is a compressed difference; for mild, unbiased compression.",
        source="Tang et al. 2018, Communication Compression for Decentralized Training, Algorithm 1",
        graph=GraphNeed.DOUBLY,
        compresses=True,
        needs_unbiased=True,
        changes_members=True,
        uses_averaging_rate=False,
        mixes_before_step=True,
        memory=Memory.REPLICAS,
        robust_mixing=True,
    )

    starts_at_x0: ClassVar[bool] = True

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        self._t = t
        weighted_replicas_(self._scratch, self.node, t, self.replicas)
        add_scaled_(self._scratch, -rate, gradient)
        self._scratch -= self.x
        if (share := self.reaches.share_within(t, self.x, lambda: self._scratch)) < 1.0:
            self._scratch *= self.x.dtype.type(share)
        payload = compress(self.node, t, self._scratch)
        own = self.replicas.apply_own_(t, payload)
        for part in self.node.layout.slices:
            store_(self.x[part], floats_of(own[part]))
        return Exchange(self.replicas.messages(t, payload), frozenset(self.replicas.senders))

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        _update_all_(self.replicas, self.node, self._t, inbox, 1.0, 1.0)
        self._weights = _heard_weights(self.node, inbox, 1.0)
        return None


class EcdPsgd(ReplicaAlgorithm):
    """x' = Σ_j W_ij x̂_j − γ g(x); send C[(1 − s/2) x + (s/2) x'], s = t + 1; x̂_j ← (1 − 2/s) x̂_j + (2/s) C_j; x ←
    x'.

    Tang et al. 2018, extrapolation compression (ECD-PSGD), Algorithm 2. Copies start at x₀; the own term of the sum is
    the own estimate too. The vector sent grows with s, so that C has to be fine and unbiased.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="ecd-psgd",
        summary="D-PSGD on estimates fed by compressed extrapolations; for fine, unbiased compression.",
        source="Tang et al. 2018, Communication Compression for Decentralized Training, Algorithm 2",
        graph=GraphNeed.DOUBLY,
        compresses=True,
        needs_unbiased=True,
        changes_members=True,
        uses_averaging_rate=False,
        grows_what_it_sends=True,
        mixes_before_step=True,
        memory=Memory.REPLICAS,
    )

    starts_at_x0: ClassVar[bool] = True

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        super().__init__(node, x0)
        self._scratch = np.empty_like(self.x)  # It becomes x, so that it cannot be shared.

    def scales(self, t: int) -> tuple[float, float]:
        return 2.0 / (t + 1), 1.0 - 2.0 / (t + 1)

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        self._t, s = t, t + 1
        following = self._scratch
        weighted_replicas_(following, self.node, t, self.replicas)
        add_scaled_(following, -rate, gradient)
        if (share := self.reaches.share_within(t, self.x, lambda: following - self.x)) < 1.0:
            following[:] = self.x + self.x.dtype.type(share) * (following - self.x)
        # x becomes the extrapolation; its own memory is free after that and serves as the next scratch.
        extrapolation = self.x
        extrapolation *= self.x.dtype.type(1.0 - s / 2.0)
        add_scaled_(extrapolation, s / 2.0, following)
        payload = compress(self.node, t, extrapolation)
        self.x, self._scratch = following, extrapolation
        self.replicas.apply_own_(t, payload, *self.scales(t))
        return Exchange(self.replicas.messages(t, payload), frozenset(self.replicas.senders))

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        _update_all_(self.replicas, self.node, self._t, inbox, *self.scales(self._t))
        self._weights = _heard_weights(self.node, inbox, 1.0)
        return None


def weighted_replicas_(out: FloatArray, node: NodeContext, t: int, replicas: Replicas) -> None:
    """Overwrite `out` with Σ_j W_ij x̂_j, self in its place; or with what `robust` makes of the copies."""
    if node.robust is not None:
        store_(out, floats_of(replicas.own))
        heard = [(node.schedule.weight(t, node.peer, j), replicas.of[j]) for j in sorted(replicas.senders)]
        add_robust_(out, node.robust, 1.0, replicas.own, [each for each in heard if each[0] > 0.0])
        return
    out.fill(0)
    for j, copy in replicas.of.items():
        add_scaled_(out, node.schedule.weight(t, node.peer, j), copy)


def _update_all_(
    replicas: Replicas, node: NodeContext, t: int, inbox: Mapping[int, Message], scale: float, decay: float
) -> None:
    # A lost peer's copy goes with it, before it is used again.
    check_inbox(inbox, replicas.senders, t, node.layout, may_lack=can_lose_peers(node))
    for message in inbox.values():
        replicas.check(message)
    for sender in sorted(inbox):
        replicas.apply_(inbox[sender], scale, decay)
