"""Coding of the two models of a pair as payloads: the part in which algorithms without rounds differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from peer.compress.payload import FloatArray, MoreBits, Payload, WholeIntegers
from peer.compress.payload_norm import norm
from peer.errors import RemoteProtocolError
from peer.gossip.base import NodeContext
from peer.wire.message import Message, RepairWish

FurtherBits: TypeAlias = dict[int, list[MoreBits | WholeIntegers]]
"""Layer → the repairs that came for it, in the order in which they were asked for."""


class PairCoding(ABC):
    """One peer's side of the coding. Between `read` or `read_own` and the end of an exchange it holds both x̂."""

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        self.node = node
        self.theirs, self.ours = np.empty_like(x0), np.empty_like(x0)
        """x̂ of both ends of the exchange under way."""
        self.distance: float | None = None
        """‖x̂_other − x_own‖₂ in the last exchange, x_own as it was sent."""
        self.largest_theta: float | None = None
        """The largest θ of the last exchange, where numbers are coded."""

    @abstractmethod
    def code_request(self, x: FloatArray, number: int) -> Payload:
        """Return the payload of x for the request of that exchange."""

    @abstractmethod
    def code_reply(self, x: FloatArray, request: Message) -> Payload:
        """Return the payload of x for the reply; the requester's x̂ stands in `theirs`."""

    @abstractmethod
    def check(self, message: Message) -> None:
        """Raise RemoteProtocolError unless the payload can be read with this run's settings."""

    def reach(self, message: Message) -> float:
        """Return how far a message can move a model (`plausibility`)."""
        return norm(message.layers)

    @abstractmethod
    def read(self, message: Message, reference: FloatArray, further: FurtherBits) -> tuple[RepairWish, ...]:
        """Write the sender's x̂ to `theirs`; return wishes for layers that cannot be read yet."""

    @abstractmethod
    def read_own(self, sent: Payload, reference: FloatArray, number: int) -> None:
        """Write to `ours` the x̂ that the other end reads from an own payload, which codes `reference`."""

    def note_step(self, gradient: FloatArray, rate: float) -> None:  # noqa: B027 (nothing to note by default)
        """Note a gradient step."""

    @abstractmethod
    def note_exchange(self, x: FloatArray, heard: Message, reference: FloatArray, violated: frozenset[int]) -> None:
        """Note an exchange before x changes; `theirs` and `ours` hold both x̂. `violated`: the layers of the request
        that had to be repaired."""

    def repair_layer(
        self, wish: RepairWish, request: Message, sent: FloatArray, asker: int
    ) -> MoreBits | WholeIntegers:
        """Return further bits of one layer of the own request, which codes `sent`. Raises RemoteProtocolError if an
        honest asker would not wish for them."""
        raise RemoteProtocolError("asks to repair what was sent in full", peer=asker)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return the state that must survive a crash, as named arrays."""
        return {}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:  # noqa: B027 (most keep nothing)
        """Restore a result of `state`."""
