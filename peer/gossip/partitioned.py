"""All-reduce in parts: each member owns a part of the numbers, adds up all contributions to it, and tells everybody the
sum. What is added up, and how it is written, the algorithms decide."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from peer.compress.block_float import Sizes
from peer.compress.float_types import change_
from peer.compress.layout import Layout
from peer.compress.payload import FloatArray, Kept, Payload
from peer.errors import LocalProtocolError, RemoteProtocolError
from peer.gossip.base import Exchange, NodeContext
from peer.gossip.centralized import MeanStep
from peer.gossip.error_feedback import ErrorFeedback
from peer.gossip.mixing import add_scaled_, can_lose_peers, other_members
from peer.wire.message import Message, MessageKind


@dataclass(frozen=True, eq=False)
class Part:
    """The numbers that one member adds up."""

    numbers: slice
    pieces: Sizes
    """The lengths of the pieces of vectors among them: int64[pieces]."""
    first: int
    """Number of its first piece: pieces are numbered through all parts."""

    @cached_property
    def layout(self) -> Layout:
        """The pieces as layers. Only of a part that has any numbers."""
        return Layout.of_sizes(self.pieces.tolist())


@dataclass(frozen=True)
class _Shares:
    """Division of the numbers among the members that add them up."""

    members: tuple[int, ...]
    parts: Mapping[int, Part]
    owners: tuple[int, ...]
    """The members that own any numbers."""


def _divide(sizes: Sizes, members: tuple[int, ...]) -> _Shares:
    """Divide the numbers of vectors of `sizes: int64[vectors]` as evenly as possible."""
    ends, first = np.cumsum(sizes), 0
    parts: dict[int, Part] = {}
    for position, member in enumerate(members):
        start, stop = (int(ends[-1]) * edge // len(members) for edge in (position, position + 1))
        inside = np.clip(ends, start, stop)
        pieces: Sizes = np.diff(inside, prepend=start)
        parts[member] = Part(slice(start, stop), pieces[pieces > 0], first)
        first += parts[member].pieces.size
    return _Shares(members, parts, tuple(member for member in members if parts[member].pieces.size))


class PartitionedAllReduce(MeanStep, ErrorFeedback):
    """x ← x − γ ω · momentum(U), where U is the mean of all peers' contributions, the same on all peers, and ω is
    `NodeContext.outer_rate`.

    In phase 0 everybody sends each owner this peer's numbers of its part, and in phase 1 the owner tells everybody the
    sum. What a peer does not contribute stays in its error memory E, and so does what an owner does not tell. In
    bfloat16, E is rounded stochastically where the gradient comes to it, where it is shortened, and where what was
    contributed or told leaves it: each time by less than 2⁻⁷ of a number, and by 0 in the mean.
    What reaches further than own messages may (`plausibility`) is shortened first: such a model diverges.

    Momentum and weight decay act on U (`spec.acts_on_mean`), so g is the plain gradient, or the sum of those of several
    local steps. With several, adamw and muon act in each of them, and g is the sum of their directions. If every owner
    tells all the same sum, all peers whose processors round alike hold one x and one momentum, to the bit. When members
    change, momentum begins anew at all peers; each keeps its E, and a leaving peer's E is lost. A newcomer needs only
    x.

    A lost peer may have told its sum to some and not to others. Until the graph without it begins, nobody owns its
    part, and E keeps the shares of it. Then all take the model of the first member (`boundary.transfers`); a peer in
    another state has contributed one part of one round twice, or not at all.
    """

    message_kind = MessageKind.PART

    def __init__(self, node: NodeContext, x0: FloatArray, *vectors: Sizes) -> None:
        """`vectors`: int64[vectors], the lengths of those that are added up; several take turns, round by round."""
        super().__init__(node, x0)
        self._phase = 0
        self._awaits: frozenset[int] = frozenset()
        self._vectors = vectors
        self._known_shares: list[_Shares | None] = [None] * len(vectors)
        """Shares of each set of vectors that were asked for last."""

    # A round.

    @abstractmethod
    def _contribute(self, t: int) -> Mapping[int, Payload]:
        """Return, by owner, what this peer contributes of the error memory, which has the gradient in it."""

    @abstractmethod
    def _add_up(self, inbox: Mapping[int, Message], imposed: Payload | None) -> Payload:
        """Add up all contributions to the own part; return what is told of the sum, which is `imposed` if there is any.
        The error memory keeps the rest."""

    @abstractmethod
    def _mean_of(self, inbox: Mapping[int, Message]) -> FloatArray:
        """Take the other owners' sums and return U: float[n]. Nobody got the sum of a lost owner."""

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        """Send each owner this peer's numbers of its part."""
        self._t, self._rate, self._phase = t, rate * self.node.outer_rate, 0
        change_(self.error_memory, lambda m, part: np.add(m, gradient[part], out=m), self.rounding(t, 0))
        self._shorten_(self.error_memory)
        contributions, others = self._contribute(t), other_members(self.node, t)
        self._awaits = frozenset(others if self.node.peer in self._shares(t).owners else ())
        messages = {owner: self._message(contributions[owner], len(others) + 1) for owner in contributions}
        return Exchange({owner: messages[owner] for owner in messages if owner in others}, self._awaits)

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        self._check(inbox)
        if self._phase == 1:
            mean = self._mean_of(inbox)
            before = self.x.copy() if self._momentum.needs_round else self.x
            add_scaled_(self.x, -self._rate, self._momentum.direction_(mean, self.x))
            self._momentum.after_round(before, self.x, self._rate)
            return None
        owners, others, self._phase = self._shares(self._t).owners, other_members(self.node, self._t), 1
        self._awaits = frozenset(others).intersection(owners)
        if self.node.peer not in owners:
            return Exchange({}, self._awaits, phase=1)
        imposed = next(filter(None, (self._imposed(1, other) for other in others)), None)
        told = self._message(self._add_up(inbox, imposed), len(inbox) + 1)
        return Exchange(dict.fromkeys(others, told), self._awaits, phase=1)

    def _shorten_(self, vector: Kept, weight: float = 1.0) -> None:
        """Shorten numbers that are to be contributed or told, where they reach further than own messages may. A memory
        that grows without end would. `weight`: as in `reach`."""
        if (share := self._share_of(self._t, vector, weight * self._rate)) < 1.0:
            rounding = self.rounding(self._t, 1)
            change_(vector, lambda m, _: np.multiply(m, m.dtype.type(share), out=m), rounding)

    def _imposed(self, phase: int, receiver: int) -> Payload | None:
        """Return this peer's payload of the round from before a crash, where its arithmetic is not repeatable."""
        return self.node.imposed_parts.pop((self._t, phase, receiver), None)

    def _message(self, payload: Payload, num_contributors: int) -> Message:
        weight = 1.0 / num_contributors
        return Message(MessageKind.PART, self.node.peer, self._t, self._phase, mixing_weight=weight, layers=payload)

    # Ownership of the numbers.

    def _shares(self, t: int) -> _Shares:
        """Return the shares of round t. The division of a set of vectors changes only with the members. Lost ones are
        among them until the graph without them begins, so that all peers divide the numbers alike."""
        members, turn = self.node.schedule.members(t), t % len(self._vectors)
        known = self._known_shares[turn]
        if known is None or known.members != members:
            known = self._known_shares[turn] = _divide(self._vectors[turn], members)
        return known

    # Rules for what an honest neighbour may send.

    @abstractmethod
    def _can_read(self, layers: Payload) -> bool:
        """Whether a payload has the form that this run's have."""

    @abstractmethod
    def _fits(self, layers: Payload, part: Part) -> bool:
        """Whether a payload that can be read has as many numbers as a part, in as many pieces."""

    @abstractmethod
    def _length(self, layers: Payload, part: Part) -> float:
        """Return ‖·‖₂ of the numbers that a payload stands for."""

    def _check(self, inbox: Mapping[int, Message]) -> None:
        """Check everything before any of it is applied; see `mixing.check_inbox`."""
        unexpected, lacking = inbox.keys() - self._awaits, self._awaits - inbox.keys()
        if unexpected or (lacking and not can_lose_peers(self.node)):
            raise LocalProtocolError(
                f"round {self._t}: messages of {sorted(unexpected)} not awaited, of {sorted(lacking)} lacking"
            )
        for sender, message in inbox.items():
            if (message.sender, message.round, message.phase) != (sender, self._t, self._phase):
                raise LocalProtocolError(f"round {self._t}: the driver took {message} for a message of peer {sender}")
            self.check_codes(message)
            self.check_part(message)

    def phases_from(self, sender: int) -> tuple[int, ...]:
        return (0, 1)

    def check_codes(self, message: Message) -> None:
        if message.kind is not MessageKind.PART or not self._can_read(message.layers):
            raise RemoteProtocolError("sent a part of a sum in a form that this run does not have", peer=message.sender)

    def check_part(self, message: Message) -> None:
        owner = message.sender if message.phase else self.node.peer
        part = self._shares(message.round).parts[owner]
        if not self._fits(message.layers, part):
            raise RemoteProtocolError(
                f"did not send the {part.numbers.stop - part.numbers.start} numbers in {part.pieces.size} pieces of the"
                f" part that peer {owner} adds up",
                peer=message.sender,
            )

    def reach(self, message: Message, rate: float, receiver: int) -> float:
        """Return how far a part would bring x if it were that of the mean; a sum has as many times that in it as it has
        contributors. It counts whole, and any other message at most half."""
        part = self._shares(message.round).parts[message.sender if message.phase else receiver]
        mean = self._length(message.layers, part) * (2.0 * message.mixing_weight if message.phase else 1.0)
        return self._step_reach(message.sender, mean, rate * self.node.outer_rate)

    def shortened(self, t: int, gradient: FloatArray, rate: float) -> FloatArray:
        """Return the gradient: with the error memory it is shortened."""
        return gradient
