"""The model of one peer of a pair: read and stepped by the training, mixed by exchanges, and its counters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from peer.compress.payload import FloatArray, Payload, Residues
from peer.errors import RemoteProtocolError
from peer.gossip.base import NodeContext
from peer.gossip.mixing import add_scaled_, distance
from peer.gossip.pairs.coding import FurtherBits, PairCoding
from peer.gossip.pairs.events import Event
from peer.gossip.plausibility import Reaches, norm_of
from peer.wire.message import Message, RepairWish


@dataclass
class Staleness:
    """Age of gradients when they were applied. A checkpoint holds the fields in this order."""

    steps_at_read: int = 0
    exchanges_at_read: int = 0
    steps: int = 0
    """Gradient steps taken."""
    exchanges: int = 0
    """Exchanges completed."""
    exchanges_between: int = 0
    """Exchanges between read and step, summed over the steps."""
    most_exchanges_between: int = 0
    steps_between: int = 0
    """Own steps between read and step, summed (0 unless the driver pipelines)."""

    def note_read(self) -> None:
        """Note that a gradient is computed at the model as it is now."""
        self.steps_at_read, self.exchanges_at_read = self.steps, self.exchanges

    def note_step(self) -> None:
        """Note that it was applied."""
        between = self.exchanges - self.exchanges_at_read
        self.exchanges_between += between
        self.most_exchanges_between = max(self.most_exchanges_between, between)
        self.steps_between += self.steps - self.steps_at_read
        self.steps += 1


class PairModel:
    """x with its log and counters, shared by initiator and responder."""

    def __init__(self, node: NodeContext, x0: FloatArray, coding: PairCoding) -> None:
        self.node, self.coding = node, coding
        self.x = np.array(x0, copy=True)
        self.staleness = Staleness()
        self.reaches = Reaches(node.peer, node.layout.size, node.largest_loss)
        self.reaches.note_own(0, self.norm())
        self.events: list[Event] = []
        """Events of x that were not taken yet."""

    def norm(self) -> float:
        """Return ‖x‖₂."""
        return norm_of(self.x)

    def read(self) -> FloatArray:
        """Return a copy of x to compute a gradient at."""
        self.staleness.note_read()
        self.events.append(("read", self.node.peer))
        return self.x.copy()

    def read_theirs(self, message: Message, reference: FloatArray, further: FurtherBits) -> tuple[RepairWish, ...]:
        """Let the coding read a message. Raises RemoteProtocolError if its codes stand for no honest peer's model."""
        wishes, theirs = self.coding.read(message, reference, further), self.coding.theirs
        is_coded = not wishes and any(isinstance(layer, Residues) for layer in message.layers)
        if is_coded and not self.reaches.lets_by(
            self.staleness.steps, message.sender, theirs, reference, distance(theirs, reference)
        ):
            raise RemoteProtocolError("sent codes of a model that no honest peer has", peer=message.sender)
        return wishes

    def step(self, gradient: FloatArray, rate: float) -> None:
        """x ← x − γ g."""
        add_scaled_(self.x, -rate, gradient)
        self.coding.note_step(gradient, rate)
        self.staleness.note_step()
        self.events.append(("step", self.node.peer, rate))

    def mix(self, heard: Message, sent: Payload, reference: FloatArray, violated: frozenset[int]) -> None:
        """Add ½ (x̂_other − x̂_own as sent). The coding has read `heard`; `sent` codes `reference`."""
        coding = self.coding
        coding.read_own(sent, reference, heard.round)
        coding.note_exchange(self.x, heard, reference, violated)
        # The difference first: where both are equal x does not move at all.
        np.subtract(coding.theirs, coding.ours, out=coding.theirs)
        add_scaled_(self.x, 0.5, coding.theirs)
        self.staleness.exchanges += 1
