"""Messages between two peers, as values: the content of one frame.

A message knows nothing of sequence numbers, chunks or connections (those belong to the link), nor of bytes (those
belong to `wire.frame`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from peer.compress.payload import Payload


class MessageKind(enum.IntEnum):
    """Purpose of a message."""

    GOSSIP = 0
    """The payload of a round (a gradient, where a server collects gradients)."""
    NOTHING = 1
    """The sender gives this receiver no mass in this round; no layers."""
    REPAIR_REQUEST = 2
    """The receiver of a modulo code could not recover some layers: `wanted` lists them. No layers."""
    REPAIR = 3
    """Further bits of the integers of an earlier message, for the layers in `layer_ids`."""
    PAIR_REQUEST = 4
    """AD-PSGD: the initiator's half of a pairwise exchange."""
    PAIR_REPLY = 5
    """AD-PSGD: the responder's half."""
    PAIR_BUSY = 6
    """AD-PSGD: the responder is in another exchange; ask again later. No layers."""
    PART = 7
    """A part of a vector that is summed in parts: `layers` are no layers of the layout, and have sizes of their own."""


@dataclass(frozen=True)
class RepairWish:
    """One layer of a `REPAIR_REQUEST`."""

    layer: int
    known_bits: int
    """Low bits of K that the receiver holds already."""
    more_bits: int
    """Further bits that it asks for, 1 to 16; 0 asks for all of K."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the gossip protocol."""

    kind: MessageKind
    sender: int
    round: int
    """The round this belongs to; for the pairwise kinds, the exchange's number at its initiator."""
    phase: int = 0
    """Number of the exchange in the round, from 0."""
    mixing_weight: float = 0.0
    """W_ij that the receiver i gives this, as told by the sender j (without the averaging rate)."""
    push_weight: float = 1.0
    """u_j at the start of the gossip step; 1 outside the push-sum family."""
    layers: Payload = ()
    layer_ids: tuple[int, ...] | None = None
    """Numbers of the layers in `layers`; None for all of the layout, in order."""
    wanted: tuple[RepairWish, ...] = ()

    def __str__(self) -> str:
        parts = ", ".join(type(layer).__name__ for layer in self.layers[:3])
        more = ", …" if len(self.layers) > 3 else ""
        return f"{self.kind.name} from {self.sender} round {self.round}.{self.phase} [{parts}{more}]"
