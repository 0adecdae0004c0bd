"""The exchanges with which a round ends where the next one has other members: mass is handed over, copies are shipped.

They follow the algorithm's own exchanges of that round, as further phases of it, so that numbers, journal and replay
know nothing special of them. What follows is the same at every peer, from the membership and the graphs alone.

What is carried over, and why the mass stays right:

- push-sum (sgp, sparse-push, scsp, quant-sgp): a joining peer gets the half of its sponsor's (x, u), a leaving one
  gives all of its (x, u) to its heir. Σx and Σu do not change, and no z but the heir's does. The error memory of a
  sponsor shrinks with its x, of which it is what is yet to be told; that of a leaving peer was no mass and goes.
- doubly stochastic (d-psgd, naive-quantized, deep-squeeze, choco-sgd, dcd-psgd, ecd-psgd, moniqua, d2, moniqua-d2): a
  joining peer starts at its sponsor's x, a leaving one gives nothing: the mean is that of the models that are there.
- copies x̂ (choco-sgd, quant-sgp, dcd-psgd, ecd-psgd): an edge that is new begins with the whole copy, bit for bit.
  Where x jumps (a sponsor, an heir, a joining peer) the copy restarts at the new x at all its receivers: what they know
  of it would otherwise be wrong by that jump for many rounds, though no mass would be lost. What DCD and ECD keep of
  those who stay goes on: their copies hold what the payloads said, whoever else hears those.
- the memory of D² (d2, moniqua-d2) starts anew at all peers (`Algorithm.start_anew`).
- modulo codes with hashes: nobody leaves the round, or the neighbours that it had in it, before those have read its
  codes, since they may ask for more bits of them. What codes are told against begins whole on an edge that is new.
- allreduce: everybody has the same x, and who joins gets it; after a loss all take that of the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from peer.compress import add_decompressed_
from peer.errors import StateError
from peer.gossip.base import Algorithm, AlgorithmSpec, Exchange, GraphNeed
from peer.gossip.membership import ChangeKind
from peer.gossip.mixing import check_message, whole
from peer.gossip.views import ViewSchedule
from peer.wire.message import Message, MessageKind

TRANSFER_PHASE = 1 << 16
"""Far from the phases of any algorithm."""
COPY_PHASE = TRANSFER_PHASE + 1
READ_PHASE = TRANSFER_PHASE - 1
"""A message of this phase says that all codes of the round were read."""
UNSPONSORED_WEIGHT = 2.0**-20
"""The push-sum weight with which a peer joins whose sponsor was lost before it gave it anything: next to nothing, so
that its model is that of its neighbours after the first round."""


@dataclass(frozen=True)
class Transfer:
    """(x, u), or a part of it, that goes from one peer to another at the end of a round."""

    giver: int
    taker: int
    is_all: bool
    """A leaving peer's; otherwise a sponsor's part for a joining one."""


def transfers(views: ViewSchedule, t: int, spec: AlgorithmSpec) -> tuple[Transfer, ...]:
    """Return what is handed over between round t and the next one."""
    found, push_sum = [], spec.push_sum
    changes = views.membership.changes_at(t + 1)
    if spec.graph is GraphNeed.COMPLETE and any(change.kind is ChangeKind.LOST for change in changes):
        first, *others = [peer for peer in views.membership.members(t + 1) if peer in views.membership.members(t)]
        joined = [change.subject for change in changes if change.kind is ChangeKind.JOIN]
        return tuple(Transfer(first, taker, is_all=False) for taker in (*others, *joined))
    for change in changes:
        if change.kind is ChangeKind.JOIN:
            found.append(Transfer(change.issuer, change.subject, is_all=False))
        elif change.kind is ChangeKind.LEAVE and push_sum:
            heir = heir_of(views, t, change.subject)
            if heir is not None:
                found.append(Transfer(change.subject, heir, is_all=True))
    # A sponsor that leaves in the same round shares first.
    return tuple(sorted(found, key=lambda each: (each.is_all, each.giver, each.taker)))


def heir_of(views: ViewSchedule, t: int, leaver: int) -> int | None:
    """Return who takes over what a peer has that leaves after round t: the next of its receivers that stays, else of
    its senders, else of all; None if nobody stays."""
    before, after = views.membership.members(t), views.membership.members(t + 1)
    stay = [peer for peer in before if peer in after]
    receivers = views.receivers_from(t, leaver, with_absent=True)
    senders = views.senders_from(t, leaver, with_absent=True)
    # Who is treated as absent is for each peer to know; what is decided here has to be the same everywhere.
    for group in (receivers, senders, stay):
        candidates = [peer for peer in group if peer in stay]
        if candidates:
            return min(candidates, key=lambda peer: (peer - leaver) % views.num_peers)
    return None


def partners(views: ViewSchedule, t: int, peer: int, spec: AlgorithmSpec) -> set[int]:
    """Return with whom a peer exchanges anything between round t and the next one beyond its neighbours."""
    moved = transfers(views, t, spec)
    return {each.taker for each in moved if each.giver == peer} | {each.giver for each in moved if each.taker == peer}


def take_back_gifts_(algorithm: Algorithm, gifts: Sequence[Message]) -> None:
    """Add what was given to a peer that is lost and never got it to a push-sum peer that gave it."""
    for gift in gifts if algorithm.spec.push_sum else ():
        add_decompressed_(algorithm.x, gift.layers, algorithm.node.layout, 1.0)
        algorithm.u += gift.push_weight


class Boundary:
    """One peer's part in the end of round t. `begin`, then `advance` with what came, until there is no exchange."""

    def __init__(self, algorithm: Algorithm, views: ViewSchedule, t: int) -> None:
        self._algorithm, self._views, self._t = algorithm, views, t
        self._me = algorithm.node.peer
        self._moved = transfers(views, t, algorithm.spec)
        self._phase = READ_PHASE

    def begin(self) -> Exchange | None:
        """Say what this peer is done with; return the exchange of it, or the next one where there is nothing to say."""
        algorithm, t = self._algorithm, self._t
        if algorithm.spec.modulo and algorithm.node.modulo.verified:
            # The graph of a code with hashes is undirected.
            heard = self._views.receivers_from(t, self._me, with_absent=True)
            neighbors = frozenset(heard) - self._views.absent.keys()
            if neighbors:
                read = Message(MessageKind.NOTHING, self._me, t, READ_PHASE)
                return Exchange(dict.fromkeys(sorted(neighbors), read), neighbors, READ_PHASE)
        return self._shares()

    def _shares(self) -> Exchange | None:
        """Give away what others get; return the exchange of it, or the next one where nothing moves here."""
        self._phase = TRANSFER_PHASE
        gifts = [each for each in self._moved if each.giver == self._me]
        shares = sum(not each.is_all for each in gifts)
        sends = {}
        for number, gift in enumerate(gifts):
            share = 1.0 if gift.is_all else 1.0 / (shares - number + 1)
            sends[gift.taker] = self._part(share)
        awaits = frozenset(each.giver for each in self._moved if each.taker == self._me)
        if sends or awaits:
            return Exchange(sends, awaits, TRANSFER_PHASE)
        return self._copies()

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        """Take what came. Raises RemoteProtocolError for what cannot be used, and StateError where the sponsor of this
        peer was lost before it gave it a model, which nothing but push-sum can do without."""
        if self._phase == READ_PHASE:
            return self._shares()
        for message in inbox.values():
            check_message(message, self._algorithm.node.layout)
        if self._phase == COPY_PHASE:
            assert self._algorithm.replicas is not None
            for message in inbox.values():
                self._algorithm.replicas.start_copy(message)
            return None
        is_new = self._me not in self._views.membership.members(self._t)
        algorithm = self._algorithm
        if is_new and not inbox:
            if not algorithm.spec.push_sum:
                raise StateError(
                    "the sponsor of this peer was lost before it handed over its model; let one of the others remove "
                    "this peer, and join under another entry"
                )
            algorithm.x *= algorithm.x.dtype.type(UNSPONSORED_WEIGHT)
            algorithm.u = UNSPONSORED_WEIGHT
        for _, message in sorted(inbox.items()):
            if is_new or not algorithm.spec.push_sum:
                algorithm.x.fill(0)
                algorithm.u = 0.0
            add_decompressed_(algorithm.x, message.layers, algorithm.node.layout, 1.0)
            algorithm.u = algorithm.u + message.push_weight if algorithm.spec.push_sum else 1.0
        return self._copies()

    def _part(self, share: float) -> Message:
        """Return a message with a part of (x, u); a push-sum peer keeps the rest, any other all."""
        algorithm = self._algorithm
        x, u = algorithm.x, algorithm.u
        if algorithm.spec.push_sum:
            x, u = x * x.dtype.type(share), u * share
            # A leaving peer keeps the model that it ends with.
            if share < 1.0:
                algorithm.x -= x
                algorithm.u -= u
                algorithm.shrunk_(1.0 - share)
        layers = whole(x, algorithm.node.layout)
        return Message(MessageKind.GOSSIP, self._me, self._t, TRANSFER_PHASE, 1.0, u, layers)

    def _copies(self) -> Exchange | None:
        """Switch to the edges of the next round; return the exchange of copies, if any begins."""
        self._phase = COPY_PHASE
        views, me, t = self._views, self._me, self._t
        views.enter(t + 1)
        self._algorithm.start_anew()
        replicas = self._algorithm.replicas
        if replicas is None:
            return None
        restart = {each.taker for each in self._moved}
        if self._algorithm.spec.push_sum:
            restart |= {each.giver for each in self._moved}
        known, told = set(views.senders_from(t, me)), set(views.receivers_from(t, me))
        senders, receivers = views.senders_from(t + 1, me), views.receivers_from(t + 1, me)
        replicas.change_edges(senders, receivers, t + 1)
        if me in restart:
            replicas.restart_own(self._algorithm.x, t + 1)
        copy = replace(replicas.own_copy(t), phase=COPY_PHASE)
        sends = {peer: copy for peer in receivers if me in restart or peer not in told}
        awaits = frozenset(peer for peer in senders if peer in restart or peer not in known)
        return Exchange(sends, awaits, COPY_PHASE) if sends or awaits else None
