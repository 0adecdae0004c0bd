"""All-reduce of low-rank factors: exact sums of a few vectors for each matrix, in place of whole gradients.

After PowerSGD (Vogels et al. 2019), whose two factors take turns (Zhang et al. 2023, ACP-SGD), with the sum made in
parts: each member owns a part of the numbers, adds up all contributions to it, and tells everybody the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from peer.compress import block_float
from peer.compress.block_float import BlockFloat, Exponents, Sizes
from peer.compress.payload import FloatArray, Levels
from peer.errors import LocalProtocolError, RemoteProtocolError
from peer.gossip.base import (
    Algorithm,
    AlgorithmSpec,
    Exchange,
    GraphNeed,
    Memory,
    Metrics,
    NodeContext,
    named_state,
    restored_momentum,
)
from peer.gossip.centralized import step_reach
from peer.gossip.factors import Factors
from peer.gossip.mixing import (
    add_scaled_,
    can_lose_peers,
    in_sender_order,
    other_members,
    restored_like,
    shares_of_mean,
)
from peer.gossip.views import ViewSchedule
from peer.wire.message import Message, MessageKind

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Shares:
    """Division of one side's factors among the members that add them up."""

    members: tuple[int, ...]
    parts: Mapping[int, tuple[slice, Sizes]]
    """Member → its numbers, and the lengths of the pieces of vectors among them."""
    owners: tuple[int, ...]
    """The members that own any numbers."""


def _divide(sizes: Sizes, members: tuple[int, ...]) -> _Shares:
    """Divide the numbers of factors with vectors of `sizes: int64[vectors]` as evenly as possible."""
    ends = np.cumsum(sizes)
    parts: dict[int, tuple[slice, Sizes]] = {}
    for position, member in enumerate(members):
        start, stop = (int(ends[-1]) * edge // len(members) for edge in (position, position + 1))
        inside = np.clip(ends, start, stop)
        pieces: Sizes = np.diff(inside, prepend=start)
        parts[member] = slice(start, stop), pieces[pieces > 0]
    return _Shares(members, parts, tuple(member for member in members if parts[member][1].size))


class LowRank(Algorithm):
    """x ← x − γ · momentum(U), where U is the mean of all peers' contributions of M_j = g_j + E_j, the same on all
    peers.

    In even rounds, with Q of the round before:  P = mean_j C[M_j Q],  U = P Qᵀ,  then P ← orthonormal(P)
    In odd rounds, with P of the round before:   Q = mean_j C[M_jᵀ P],  U = P Qᵀ,  then Q ← orthonormal(Q)
    E_i ← M_i − c_i, where c_i is what peer i contributed to U, multiplied out: projected, and rounded by C.

    Layers without a basis (`factors`) are their own factor. C is block floating point, each vector of a factor with an
    exponent of its own, or all vectors of a layer with the largest of them (`LowRankOptions`). The members share the
    numbers of the factors: in phase 0 everybody sends each owner its part, and in phase 1 the owner tells everybody the
    sum, rounded by C again. The error of that rounding goes to the owner's E, so that Σ c_j = n U and
    Σ E_j + n U = Σ M_j, but for rounding in the float type.

    Momentum and weight decay act on U (`spec.momentum_of_mean`), so g is the plain gradient, or the sum of those of
    several local steps. If every owner tells all the same sum, all peers whose processors round alike hold one x, one
    basis and one momentum, to the bit. When members change, basis and momentum begin anew at all peers; each keeps its
    E, and a leaving peer's E is lost. A newcomer needs only x.

    A lost peer may have told its sum to some and not to others. Until the graph without it begins, nobody owns its
    part, and E keeps the shares of it. Then all take the model of the first member (`boundary.transfers`); a peer in
    another state has contributed one part of one round twice, or not at all.
    """

    spec: ClassVar[AlgorithmSpec] = AlgorithmSpec(
        name="low-rank",
        summary="Exact sums of low-rank factors of the gradients: nearly all-reduce, at a hundredth of its bytes.",
        source="Vogels et al. 2019, PowerSGD; Zhang et al. 2023, ACP-SGD; summed in block floating point",
        graph=GraphNeed.COMPLETE,
        changes_members=True,
        uses_averaging_rate=False,
        exchanges=2,
        sends_factors=True,
        momentum_of_mean=True,
        memory=Memory.ERRORS,
        tells_all=1,
    )
    message_kind = MessageKind.PART

    def __init__(self, node: NodeContext, x0: FloatArray) -> None:
        super().__init__(node, x0)
        self.error_memory = np.zeros_like(self.x)
        self._factors = Factors(node.layout, node.low_rank.rank)
        self._bits = node.low_rank.bits
        self._by_layer = node.low_rank.exponents == "layer"
        self._momentum = node.momentum()
        self._basis: FloatArray | None = None
        """Basis of the coming round; None if it is drawn."""
        self._rate, self._phase = 0.0, 0
        self._awaits: frozenset[int] = frozenset()
        self._least: Exponents | int = block_float.LOWEST
        """The least exponents of the sums of the own part, if layers have one."""
        self._vector: Vector = np.zeros(0)
        """This peer's contribution to the factors of the round."""
        self._mean: Vector = np.zeros(0)
        self._known_shares: list[_Shares | None] = [None, None]
        """Shares of each side that were asked for last."""

    # A round.

    def begin(self, t: int, gradient: FloatArray, rate: float) -> Exchange:
        """Send each owner this peer's numbers of its part."""
        self._t, self._rate, self._phase = t, rate, 0
        if self._basis is None:
            self._basis = self._factors.first_basis(t % 2, self.node.draw_source.draws(t)).astype(self.x.dtype)
        self.error_memory += gradient
        factors = self._factors.project(self.error_memory, self._basis, t % 2)
        self._vector, self._mean = np.zeros(factors.size), np.zeros(factors.size)
        sends, others, shares = {}, self._others(t), self._shares(t)
        pieces = [shares.parts[owner][1] for owner in shares.owners]
        encoded = self._encode(factors, np.concatenate(pieces))
        for owner, block in zip(shares.owners, block_float.split(encoded, pieces), strict=True):
            part, sizes = shares.parts[owner]
            block = self._imposed(0, owner) or block
            self._vector[part] = block_float.decode(block, sizes)
            if owner == self.node.peer and self._by_layer:
                # The own ones alone: with those of others, one that lies could have a sum rounded to nothing.
                self._least = block_float.integers(block[0])
            if owner in others:
                sends[owner] = self._message(block, len(others) + 1)
        self._awaits = frozenset(others if self.node.peer in self._owners(t) else ())
        return Exchange(sends, self._awaits)

    def _encode(
        self, values: FloatArray, pieces: Sizes, start: int = 0, least: Exponents | int = block_float.LOWEST
    ) -> BlockFloat:
        """Return the numbers of the factors from number `start` on in C, by pieces of vectors: int64[pieces].

        `least`: exponents below which none is chosen, int64[pieces], where layers share theirs.
        """
        if not self._by_layer:
            return block_float.encode(values, pieces, self._bits)
        ends = np.cumsum(self._factors.layer_sizes[self._t % 2])
        layers, largest = np.searchsorted(ends, start + np.cumsum(pieces)), np.full(ends.size, block_float.LOWEST)
        np.maximum.at(largest, layers, block_float.exponents(values, pieces, self._bits))
        return block_float.encode(values, pieces, self._bits, least=np.maximum(largest[layers], least))

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        self._check(inbox)
        if self._phase == 1:
            self._take_sums(inbox)
            self._step()
            return None
        owners, others, self._phase = self._owners(self._t), self._others(self._t), 1
        self._awaits = frozenset(others).intersection(owners)
        if self.node.peer not in owners:
            return Exchange({}, self._awaits, phase=1)
        return Exchange(dict.fromkeys(others, self._add_up(inbox, others)), self._awaits, phase=1)

    def _add_up(self, inbox: Mapping[int, Message], others: Sequence[int]) -> Message:
        """Add up all contributions to the own part; return the message with their sum."""
        part, sizes = self._part_of(self.node.peer, self._t)
        total = np.zeros(part.stop - part.start)
        for _, message in in_sender_order(self.node.peer, inbox):
            total += self._vector[part] if message is None else block_float.decode(_block(message), sizes)
        imposed = (self._imposed(1, other) for other in others)
        block = next(filter(None, imposed), None) or self._encode(total, sizes, part.start, self._least)
        told = block_float.decode(block, sizes)
        self._vector[part] -= total - told
        self._mean[part] = told / (len(inbox) + 1)
        return self._message(block, len(inbox) + 1)

    def _take_sums(self, inbox: Mapping[int, Message]) -> None:
        """Take the other owners' sums. Nobody got the sum of a lost owner."""
        for owner in self._owners(self._t):
            part, sizes = self._part_of(owner, self._t)
            if owner in inbox:
                num_contributors = round(1.0 / inbox[owner].mixing_weight)
                self._mean[part] = block_float.decode(_block(inbox[owner]), sizes) / num_contributors
            elif owner != self.node.peer:
                self._vector[part] = 0.0

    def _step(self) -> None:
        t, side, basis = self._t, self._t % 2, self._basis
        assert basis is not None
        self._factors.subtract_multiplied_out_(self.error_memory, self._vector.astype(self.x.dtype), basis, side)
        mean = self._factors.multiply_out(self._mean.astype(self.x.dtype), basis, side)
        before = self.x.copy() if self._momentum.needs_round else self.x
        add_scaled_(self.x, -self._rate, self._momentum.direction_(mean, self.x))
        self._momentum.after_round(before, self.x, self._rate)
        draws = self.node.draw_source.draws(t)
        self._basis = self._factors.next_basis(self._mean, side, draws).astype(self.x.dtype)

    def _imposed(self, phase: int, receiver: int) -> BlockFloat | None:
        """Return this peer's payload of the round from before a crash, where its arithmetic is not repeatable."""
        layers = self.node.imposed_parts.pop((self._t, phase, receiver), None)
        return None if layers is None else block_float.read(layers, self._bits)

    def _message(self, block: BlockFloat, num_contributors: int) -> Message:
        weight = 1.0 / num_contributors
        return Message(MessageKind.PART, self.node.peer, self._t, self._phase, mixing_weight=weight, layers=block)

    # Ownership of the numbers.

    def _members(self, t: int) -> tuple[int, ...]:
        """Return the members of round t. Lost ones are among them until the graph without them begins, so that all
        peers divide the numbers alike."""
        schedule = self.node.schedule
        if isinstance(schedule, ViewSchedule):
            return schedule.membership.members(t)
        return tuple(range(schedule.num_peers))

    def _owners(self, t: int) -> tuple[int, ...]:
        """Return the members that own any numbers: with fewer numbers than members not all do."""
        return self._shares(t).owners

    def _others(self, t: int) -> tuple[int, ...]:
        """Return the other members that are there."""
        return other_members(self.node, t)

    def _part_of(self, owner: int, t: int) -> tuple[slice, Sizes]:
        """Return the numbers of the factors that a member owns in round t, and the lengths of the pieces of vectors
        among them: int64[pieces]."""
        return self._shares(t).parts[owner]

    def _shares(self, t: int) -> _Shares:
        """Return the shares of round t. The division of a side changes only with the members."""
        members, side = self._members(t), t % 2
        known = self._known_shares[side]
        if known is None or known.members != members:
            known = self._known_shares[side] = _divide(self._factors.sizes[side], members)
        return known

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

    def hears(self, t: int, sender: int) -> bool:
        return sender in self._others(t)

    def phases_from(self, sender: int) -> tuple[int, ...]:
        return (0, 1)

    def weights_from(self, t: int, sender: int) -> tuple[float, ...]:
        return shares_of_mean(self.node, t)

    def check_codes(self, message: Message) -> None:
        if message.kind is not MessageKind.PART or block_float.read(message.layers, self._bits) is None:
            raise RemoteProtocolError("sent a part of a sum in a form that this run does not have", peer=message.sender)

    def check_part(self, message: Message) -> None:
        owner = message.sender if message.phase else self.node.peer
        sizes = self._part_of(owner, message.round)[1]
        exponents, codes = _block(message)
        if (exponents.codes.size, codes.codes.size) != (sizes.size, int(sizes.sum())):
            raise RemoteProtocolError(
                f"sent {codes.codes.size} numbers in {exponents.codes.size} pieces of the part that peer {owner} adds "
                f"up, which has {int(sizes.sum())} in {sizes.size}",
                peer=message.sender,
            )

    def reach(self, message: Message, rate: float, receiver: int) -> float:
        """Return how far a part would move x if it were that of the mean; a sum has as many times that in it as it has
        contributors."""
        owner = message.sender if message.phase else receiver
        numbers = block_float.decode(_block(message), self._part_of(owner, message.round)[1])
        mean = float(np.linalg.norm(numbers)) * (message.mixing_weight if message.phase else 1.0)
        return step_reach(mean, rate, self._momentum, self.x)

    # State.

    def start_anew(self) -> None:
        self._basis, self._momentum = None, self.node.momentum()

    def without(self, peer: int) -> None:
        """Nothing is kept of anybody."""

    def metrics(self) -> Metrics:
        # Nobody's model is seen here, so how far the models are apart is not known.
        return Metrics(error_norm=float(np.linalg.norm(self.error_memory)))

    def state(self) -> dict[str, Any]:
        state = {**super().state(), "error_memory": self.error_memory}
        if self._basis is not None:
            state["basis"] = self._basis
        return state | named_state(self._momentum)

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        super().restore(state)
        self.error_memory = restored_like(self.x, state["error_memory"])
        self._basis = None
        if "basis" in state:
            self._basis = np.array(state["basis"], self.x.dtype)
            if self._basis.size not in self._factors.basis_size:
                raise ValueError(f"a saved basis has {self._basis.size} numbers, not one of {self._factors.basis_size}")
        self._momentum = restored_momentum(self.node, state)


def _block(message: Message) -> BlockFloat:
    """Return the layers of a message that passed `check_codes`."""
    exponents, codes = message.layers
    assert isinstance(exponents, Levels)
    assert isinstance(codes, Levels)
    return exponents, codes
