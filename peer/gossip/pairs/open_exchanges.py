"""A peer's unfinished exchanges, as initiator or as responder, and their form in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from peer import wire
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray, MoreBits, WholeIntegers
from peer.gossip.mixing import restored_like
from peer.gossip.pairs.coding import FurtherBits
from peer.wire.message import Message, MessageKind, RepairWish


@dataclass
class OpenRequest:
    """An own request without an answer yet. Kept across a crash: the partner may have mixed with it already, and
    repeats its reply only to the same number."""

    partner: int
    message: Message
    sent: FloatArray
    """x as sent. The mix adds ½ (x̂_other − x̂_own); steps between request and reply must not change x̂_own, since the
    partner has used it."""
    first_step: int | None = None
    """Position in the log of the first step since the request: the mix belongs before it."""
    violated: set[int] = field(default_factory=set)
    """Layers of which the partner asked for more."""

    def is_subject_of(self, message: Message) -> bool:
        """Whether a message comes from the partner and is about this request."""
        return (message.sender, message.round) == (self.partner, self.message.round)

    def state(self, layout: Layout) -> dict[str, npt.NDArray[Any]]:
        """Return the request as named arrays."""
        first_step = -1 if self.first_step is None else self.first_step
        return {
            "request": message_to_array(self.message, layout),
            "request.sent": self.sent,
            "request.partner": np.array([self.partner, first_step], np.int64),
            "request.violated": np.array(sorted(self.violated), np.int64),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]], layout: Layout, x: FloatArray) -> OpenRequest | None:
        """Return the request whose arrays `state` gave; None if none was open. `x`: a vector like `sent`."""
        if "request" not in state:
            return None
        partner, first_step = (int(value) for value in state["request.partner"])
        return cls(
            partner,
            message_from_array(state["request"], layout, x.dtype),
            restored_like(x, state["request.sent"]),
            None if first_step < 0 else first_step,
            {int(layer) for layer in state["request.violated"]},
        )


@dataclass
class OpenResponse:
    """A request of another peer that cannot be read before a repair of it comes. Kept across a crash: the journal after
    the checkpoint goes on with the repair, and has to lead to the same model."""

    request: Message
    phase: int = 0
    """Repairs asked for so far."""
    wishes: tuple[RepairWish, ...] = ()
    """Bits that were asked for last."""
    further: FurtherBits = field(default_factory=dict)

    def repair_request(self, peer: int) -> Message:
        """Return the request for the wishes, with `peer` as its sender."""
        return Message(MessageKind.REPAIR_REQUEST, peer, self.request.round, phase=self.phase, wanted=self.wishes)

    def awaits(self, repair: Message) -> bool:
        """Whether that is the repair that was asked for last."""
        waits_for = (self.request.sender, self.request.round, self.phase)
        return (repair.sender, repair.round, repair.phase) == waits_for

    def take(self, repair: Message) -> None:
        """Keep the bits of a repair that was judged."""
        for layer, bits in zip(repair.layer_ids or (), repair.layers, strict=True):
            assert isinstance(bits, (MoreBits, WholeIntegers))
            self.further.setdefault(layer, []).append(bits)

    def state(self, peer: int, layout: Layout) -> dict[str, npt.NDArray[Any]]:
        """Return the response as named arrays, each one message. `peer`: the requester.

        The first repairs of all layers are one message, the second ones another, whichever phases they came in: only
        their order within a layer counts.
        """
        request, further = self.request, self.further
        messages = {"response.request": request, "response.asked": self.repair_request(peer)}
        for depth in range(max(map(len, further.values()), default=0)):
            ids = tuple(sorted(layer for layer, answers in further.items() if len(answers) > depth))
            layers = tuple(further[layer][depth] for layer in ids)
            messages[f"response.further.{depth}"] = Message(
                MessageKind.REPAIR, request.sender, request.round, phase=depth + 1, layers=layers, layer_ids=ids
            )
        return {name: message_to_array(message, layout) for name, message in messages.items()}

    @classmethod
    def from_state(
        cls, state: Mapping[str, npt.NDArray[Any]], layout: Layout, dtype: npt.DTypeLike
    ) -> OpenResponse | None:
        """Return the response whose arrays `state` gave; None if none was open."""
        if "response.request" not in state:
            return None
        asked = message_from_array(state["response.asked"], layout, dtype)
        response = cls(message_from_array(state["response.request"], layout, dtype), asked.phase, asked.wanted)
        depth = 0
        while (name := f"response.further.{depth}") in state:
            response.take(message_from_array(state[name], layout, dtype))
            depth += 1
        return response


def message_to_array(message: Message, layout: Layout) -> npt.NDArray[np.uint8]:
    """Return a message as the frame that it is on the wire: uint8[bytes]."""
    return np.frombuffer(wire.encode(message, layout), np.uint8)


def message_from_array(frame: npt.NDArray[Any], layout: Layout, dtype: npt.DTypeLike) -> Message:
    """Return the message that `message_to_array` was given. Raises RemoteProtocolError if it does not fit."""
    return wire.decode(frame.tobytes(), layout, dtype=dtype)
