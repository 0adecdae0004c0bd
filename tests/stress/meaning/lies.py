"""Makes lies up: what a peer might say that decodes as well as the truth does, but means something else.

Every lie begins with something honest, takes one to three changes, and is encoded again; what the encoder refuses is
none. Numbers are drawn from those that matter: what is true here, beside it, and the ends of every range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from struct import error as struct_error
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from peer import wire
from peer.compress.payload import (
    Dense,
    LayerPayload,
    Levels,
    MoreBits,
    Payload,
    Residues,
    Rounding,
    Sparse,
    ValueType,
    WholeIntegers,
    num_values,
)
from peer.errors import LocalProtocolError
from peer.gossip.boundary import COPY_PHASE, READ_PHASE, TRANSFER_PHASE
from peer.gossip.membership import Change, ChangeKind
from peer.node import membership_codec
from peer.wire.message import Message, MessageKind, RepairWish
from tests.peers import newcomer
from tests.stress.meaning.circumstances import LAYOUT

Codes: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
_LARGE = float(np.finfo(np.float32).max)
_REPAIR_KINDS = (MessageKind.REPAIR_REQUEST, MessageKind.REPAIR)
_WITHOUT_LAYERS = (MessageKind.NOTHING, MessageKind.REPAIR_REQUEST, MessageKind.PAIR_BUSY)


@dataclass(frozen=True)
class Place:
    """Where a lie is told: what is true there."""

    liar: int
    hearer: int
    round: int
    rounds: int
    num_peers: int
    is_pair: bool


@dataclass(frozen=True)
class Lie:
    """One frame of a liar."""

    frame: bytes
    skipped: int | None
    """How far its number is from the one that is next; None: it has none."""
    said: Message | Change
    changes: tuple[str, ...]
    """Names of what was changed."""

    def number(self, following: int) -> int:
        """Return the number that it is told with; 0 stands for none."""
        return 0 if self.skipped is None else max(0, following + self.skipped)


class Lies:
    """A source of lies about one place."""

    def __init__(self, random: Random, place: Place, honest: Sequence[Message | Change]) -> None:
        """`honest`: what the liar said to this hearer in a run in which it told the truth."""
        self.random, self.place = random, place
        self._messages = [said for said in honest if isinstance(said, Message)]
        self._near = [said for said in self._messages if abs(said.round - place.round) <= 2]
        self._changes = [said for said in honest if isinstance(said, Change)]

    def next(self) -> Lie:
        """Return a lie."""
        while True:
            lie = self._attempt()
            if lie is not None:
                return lie

    def _attempt(self) -> Lie | None:
        random = self.random
        if not self.place.is_pair and random.random() < 0.15:
            change, changes = self._change()
            try:
                frame = membership_codec.encode(change)
            except (ValueError, TypeError):
                return None  # Beyond what a field can hold.
            return Lie(frame, self._skipped(numbered=True), change, changes)
        message, changes = self._message()
        before = None
        if random.random() < 0.1 and self._messages:
            before = random.choice(self._messages)
        try:
            with np.errstate(all="ignore"):
                frame = wire.encode(message, LAYOUT, previous=before)
        except (LocalProtocolError, ValueError, TypeError, OverflowError, AssertionError, IndexError, struct_error):
            return None
        return Lie(frame, self._skipped(numbered=message.kind not in _REPAIR_KINDS), message, changes)

    def _skipped(self, *, numbered: bool) -> int | None:
        if self.place.is_pair:
            return None
        luck = self.random.random()
        if luck < 0.94:
            return 0 if numbered else None
        return self.random.choice((None, 0, -1, 1, 2, 1 << 40, 1 << 62))

    # Messages.

    def _message(self) -> tuple[Message, tuple[str, ...]]:
        random = self.random
        pool = self._near if self._near and random.random() < 0.8 else self._messages
        message = random.choice(pool) if pool and random.random() < 0.95 else self._plain()
        if random.random() < 0.7:
            # Most lies are to pass for what is due now: else all would be refused for their round.
            message = replace(message, round=self.place.round)
        names: list[str] = []
        for _ in range(random.choice((1, 1, 1, 2, 2, 3))):
            name = random.choice(_NAMES)
            message = _CHANGES[name](self, message)
            names.append(name)
        return message, tuple(names)

    def _plain(self) -> Message:
        values = np.ones(LAYOUT.size, np.float32)
        layers = tuple(Dense(values[part].copy(), ValueType.FLOAT32) for part in LAYOUT.slices)
        kind = MessageKind.PAIR_REQUEST if self.place.is_pair else MessageKind.GOSSIP
        return Message(kind, self.place.liar, self.place.round, mixing_weight=0.5, layers=layers)

    def _whole_number(self) -> int:
        place, random = self.place, self.random
        near = place.round + random.choice((-2, -1, 0, 1, 1, 2, 3, 4, 5, 8, 20))
        far = random.choice((0, 1, place.rounds - 1, place.rounds, place.rounds + 1, 1 << 31, 1 << 62, (1 << 64) - 1))
        return max(0, near) if random.random() < 0.6 else far

    def change_round(self, message: Message) -> Message:
        return replace(message, round=self._whole_number())

    def change_phase(self, message: Message) -> Message:
        special = (READ_PHASE - 1, READ_PHASE, TRANSFER_PHASE, COPY_PHASE, COPY_PHASE + 1, 1 << 32, (1 << 64) - 1)
        near = range(8)
        return replace(message, phase=self.random.choice(special if self.random.random() < 0.5 else near))

    def change_weight(self, message: Message) -> Message:
        w = message.mixing_weight
        return replace(message, mixing_weight=self._around(w, (0.0, -0.0, 0.5, 1.0, 1 / 3, 2.0, -1.0)))

    def change_push_weight(self, message: Message) -> Message:
        u = self._around(message.push_weight, (0.0, 1.0, 2.0, float(self.place.num_peers), 3.0, 3.0001))
        return replace(message, push_weight=abs(u))

    def _around(self, value: float, likely: Sequence[float]) -> float:
        random = self.random
        extremes = (5e-324, 1e-300, 1e-30, 1e30, 1e300, 1.7e308, -1e300)
        beside = (math.nextafter(value, 9.0), value * 1.001, value * 2, value / 2, value + 1e-9, -value, 1.0 - value)
        return random.choice(random.choice((likely, extremes, beside)))

    def change_sender(self, message: Message) -> Message:
        return replace(message, sender=self.random.choice((*range(self.place.num_peers + 1), 1 << 40)))

    def change_kind(self, message: Message) -> Message:
        kind = self.random.choice(tuple(MessageKind))
        layers, wanted = message.layers, tuple[RepairWish, ...]()
        ids: tuple[int, ...] | None = None
        if kind in _WITHOUT_LAYERS:
            layers = ()
        elif kind is MessageKind.PART:
            layers = tuple(self._levels(self.random.randint(1, LAYOUT.size)) for _ in range(self.random.randint(0, 3)))
        if kind is MessageKind.REPAIR_REQUEST:
            wanted = self._wishes()
        elif kind is MessageKind.REPAIR:
            ids = self._some_layers()
            layers = tuple(self._repair_layer(LAYOUT.sizes[layer]) for layer in ids)
        elif kind is not MessageKind.PART and (len(layers) != LAYOUT.num_layers or message.kind is MessageKind.REPAIR):
            layers = () if kind in _WITHOUT_LAYERS else self._plain().layers
        return replace(message, kind=kind, layers=layers, layer_ids=ids, wanted=wanted)

    def _some_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(LAYOUT.num_layers) if self.random.random() < 0.6)

    def _wishes(self) -> tuple[RepairWish, ...]:
        random = self.random
        return tuple(
            RepairWish(layer, random.choice((0, 3, 4, 8, 9, 20, 52, 53, 64)), random.choice((0, 1, 4, 8, 16)))
            for layer in self._some_layers()
        )

    def _repair_layer(self, size: int) -> LayerPayload:
        random = self.random
        if random.random() < 0.5:
            span = random.choice((4, 1 << 20, 1 << 62))
            return WholeIntegers(np.array([random.randint(-span, span - 1) for _ in range(size)], np.int64))
        bits = random.choice((1, 4, 8, 16))
        return MoreBits(random.choice((0, 4, 8, 12, 52, 64)), bits, self._codes(size, bits))

    def change_repair(self, message: Message) -> Message:
        """Ask for repairs, or answer what may have been asked."""
        if message.kind is MessageKind.REPAIR and message.layers:
            number = self.random.randrange(len(message.layers))
            assert message.layer_ids is not None
            size = LAYOUT.sizes[message.layer_ids[number]]
            return replace(message, layers=_with(message.layers, number, self._repair_layer(size)))
        return replace(message, kind=MessageKind.REPAIR_REQUEST, layers=(), layer_ids=None, wanted=self._wishes())

    def change_nothing_said(self, message: Message) -> Message:
        return replace(message, kind=MessageKind.NOTHING, layers=(), layer_ids=None, wanted=())

    def change_layer_kind(self, message: Message) -> Message:
        if message.kind is MessageKind.PART and message.layers:
            return self._other_sizes(message)
        if len(message.layers) != LAYOUT.num_layers:
            return message
        number = self.random.randrange(LAYOUT.num_layers)
        return replace(message, layers=_with(message.layers, number, self._layer(LAYOUT.sizes[number])))

    def _other_sizes(self, message: Message) -> Message:
        """Return a part with more, fewer or other numbers."""
        number = self.random.randrange(len(message.layers))
        layer = message.layers[number]
        size = max(1, num_values(layer) + self.random.choice((-2, -1, 0, 1, 3)))
        other = self._layer(size)
        if isinstance(layer, Levels) and self.random.random() < 0.7:
            other = replace(layer, codes=self._codes(size, layer.bits))
        return replace(message, layers=_with(message.layers, number, other))

    def _layer(self, size: int) -> LayerPayload:
        random = self.random
        values = np.array([self._value() for _ in range(size)], np.float32)
        match random.randrange(6):
            case 0:
                return Dense(values.astype(np.float64), ValueType.FLOAT64)
            case 1:
                return Dense(values, ValueType.FLOAT32)
            case 2:
                return self._levels(size)
            case 3:
                count = random.randint(0, size)
                where = np.array(sorted(random.sample(range(size), count)), np.int64)
                inner = Dense(values[:count], ValueType.FLOAT32) if random.random() < 0.5 else self._levels(count)
                return Sparse(size, where, inner)
            case 4:
                half = np.clip(values, -65504.0, 65504.0).astype(np.float16)
                return Dense(half.astype(np.float32), ValueType.FLOAT16)
        return self._residues(size)

    def _levels(self, size: int) -> Levels:
        random, bits = self.random, self.random.choice((1, 2, 5, 16))
        scale = float(np.float32(self._value()))
        divisor, base, step = random.choice((1, 7, 255)), random.choice((-255, -1, 0, 1)), random.choice((1, 2))
        return Levels(scale, divisor, base, step, bits, self._codes(size, bits))

    def _residues(self, size: int) -> Residues:
        random, bits = self.random, self.random.choice((4, 8, 8, 16))
        theta, rounding = float(np.float32(abs(self._value()))), random.choice(tuple(Rounding))
        return Residues(
            theta, bits, rounding, self._codes(size, bits), random.choice((None, 0, random.getrandbits(64)))
        )

    def _codes(self, size: int, bits: int) -> Codes:
        codes = [self.random.randrange(1 << bits) for _ in range(size)]
        return np.array(codes, np.uint8) if bits <= 8 else np.array(codes, np.uint16)

    def _value(self) -> float:
        random = self.random
        if random.random() < 0.7:
            return random.uniform(-2.0, 2.0)
        return random.choice((0.0, -0.0, 1e-45, 1e-30, 1e10, -1e10, 1e19, 1e30, -1e38, _LARGE, -_LARGE))

    def change_values(self, message: Message) -> Message:
        """Change numbers inside a layer, its form unchanged."""
        if not message.layers:
            return message
        number = self.random.randrange(len(message.layers))
        return replace(message, layers=_with(message.layers, number, self._other(message.layers[number])))

    def _other(self, layer: LayerPayload) -> LayerPayload:
        random = self.random
        if isinstance(layer, Dense):
            return self._other_dense(layer)
        if isinstance(layer, Levels):
            if random.random() < 0.5:
                return replace(layer, scale=float(np.float32(self._value())))
            return replace(layer, codes=self._other_codes(layer.codes, layer.bits))
        if isinstance(layer, Sparse):
            inner = self._other_dense(layer.values) if isinstance(layer.values, Dense) else layer.values
            if isinstance(inner, Levels):
                inner = replace(inner, scale=float(np.float32(self._value())))
            return replace(layer, values=inner)
        if isinstance(layer, Residues):
            match random.randrange(4):
                case 0:
                    return replace(layer, theta=float(np.float32(abs(self._value()))))
                case 1:
                    return replace(layer, check=None if random.random() < 0.3 else random.getrandbits(64))
                case 2:
                    return replace(layer, rounding=random.choice(tuple(Rounding)))
            return replace(layer, residues=self._other_codes(layer.residues, layer.bits))
        if isinstance(layer, MoreBits):
            if random.random() < 0.5:
                return replace(layer, low=random.choice((0, 4, 8, 20, 60, 64)))
            return replace(layer, codes=self._other_codes(layer.codes, layer.bits))
        integers = layer.integers.copy()
        integers[random.randrange(integers.size)] = random.choice((0, 1, -1, 1 << 40, (1 << 63) - 1, -(1 << 63)))
        return WholeIntegers(integers)

    def _other_dense(self, layer: Dense) -> Dense:
        if layer.values.size == 0:
            return layer
        values = layer.values.copy()
        if self.random.random() < 0.5:
            values[self.random.randrange(values.size)] = self._value()
        else:
            values *= values.dtype.type(self.random.choice((-1.0, 0.0, 2.0, 1e10, 1e30)))
        if layer.value_type in (ValueType.FLOAT16, ValueType.BFLOAT16):
            return Dense(values.astype(np.float32), ValueType.FLOAT32)
        return replace(layer, values=values)

    def _other_codes(self, codes: Codes, bits: int) -> Codes:
        other = codes.copy()
        if other.size:
            other[self.random.randrange(other.size)] = self.random.randrange(1 << bits)
        return other

    # Changes of the members.

    def _change(self) -> tuple[Change, tuple[str, ...]]:
        random, place = self.random, self.place
        if self._changes and random.random() < 0.4:
            change = random.choice(self._changes)
        else:
            kind = random.choice(tuple(ChangeKind))
            subject = random.choice((place.liar, place.hearer, random.randrange(place.num_peers)))
            issuer = subject if kind is ChangeKind.LEAVE else place.liar
            change = Change(kind, subject, issuer, place.round + random.choice((1, 2, 6, 9, 10, 12)), place.round)
        names: list[str] = []
        for _ in range(random.choice((0, 1, 1, 2))):
            name = random.choice(("kind", "subject", "issuer", "effective", "heard", "newcomer"))
            names.append(name)
            peer = random.choice((*range(place.num_peers + 2), 900, 1500, (1 << 32) - 1))
            match name:
                case "kind":
                    change = replace(change, kind=random.choice(tuple(ChangeKind)))
                case "subject":
                    change = replace(change, subject=peer)
                case "issuer":
                    change = replace(change, issuer=peer)
                case "effective":
                    change = replace(change, effective=self._whole_number())
                case "heard":
                    change = replace(change, heard_round=self._whole_number())
                case "newcomer":
                    said = newcomer(change.subject)
                    said = random.choice((said, replace(said, certificate=b""), replace(said, name="x" * 5000)))
                    change = replace(change, newcomer=random.choice((None, said)))
        return change, ("a change of members", *names)


_CHANGES: dict[str, Callable[[Lies, Message], Message]] = {
    "round": Lies.change_round,
    "phase": Lies.change_phase,
    "weight": Lies.change_weight,
    "push weight": Lies.change_push_weight,
    "sender": Lies.change_sender,
    "kind": Lies.change_kind,
    "repair": Lies.change_repair,
    "nothing": Lies.change_nothing_said,
    "layer": Lies.change_layer_kind,
    "values": Lies.change_values,
}
_NAMES = (*_CHANGES, "round", "phase", "weight", "push weight", "values")
"""Drawn from: what a judge has most to say about comes more often."""


def _with(layers: Payload, number: int, layer: LayerPayload) -> Payload:
    return (*layers[:number], layer, *layers[number + 1 :])
