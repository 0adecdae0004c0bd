"""The exchanges that end a round whose successor has other members: mass changes hands, new edges get replicas.

They are further phases of the round, after those of the algorithm, so that sequence numbers, journal and replay treat
them like any other exchange. The transfers follow from the membership and the graphs alone, so that every peer expects
the same ones.

State carried over, and why the mass stays right:

- push-sum (sgp, sparse-push, scsp, quant-sgp): a joining peer gets half of its sponsor's (x, u), a leaving peer gives
  all of its (x, u) to its heir. Σx and Σu do not change, and the heir's is the only z that does. The error memory of a
  sponsor shrinks with its x: it is the part of x that has not been sent yet. The error memory of a leaving peer is no
  mass, and is dropped.
- doubly stochastic (d-psgd, naive-quantized, deep-squeeze, choco-sgd, dcd-psgd, ecd-psgd, moniqua, d2, moniqua-d2): a
  joining peer starts at its sponsor's x, a leaving one gives nothing: the mean is that of the models that are there.
- replicas x̂ (choco-sgd, quant-sgp, dcd-psgd, ecd-psgd): a new edge begins with the whole replica, bit for bit. Where x
  jumps (a sponsor, an heir, a joining peer) its replica restarts at the new x at all receivers. Otherwise they would be
  wrong by that jump for many rounds, though no mass would be lost. The copies that DCD and ECD keep of remaining peers
  are untouched: they follow from the payloads, whoever else hears them.
- the memory of D² (d2, moniqua-d2) starts anew at all peers (`Algorithm.start_anew`).
- modulo codes with hashes: no peer leaves the round, or a neighbour of this round, before its neighbours have read its
  codes, since they may ask for more bits of them. Reference codes begin whole on a new edge.
- allreduce, sums in parts: everybody has the same x, and a joining peer gets it; after a loss all take the x of the
  first member. Momentum and the factors of low-rank start anew at all peers (`Algorithm.start_anew`), so that a joining
  peer needs nothing else. The error memory of a leaving peer is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from peer.compress.decompress import add_decompressed_
from peer.errors import SponsorLost
from peer.gossip.base import Algorithm, AlgorithmSpec, Exchange, GraphNeed
from peer.gossip.membership import ChangeKind
from peer.gossip.mixing import check_message, whole
from peer.gossip.replicas import replicas_of
from peer.gossip.views import ViewSchedule
from peer.wire.message import Message, MessageKind

TRANSFER_PHASE = 1 << 16
"""Mass or a model changes hands. Far from the phases of any algorithm."""
COPY_PHASE = TRANSFER_PHASE + 1
"""New edges get replicas: of the model after all transfers."""
READ_PHASE = TRANSFER_PHASE - 1
"""A message of this phase says that its sender has read all codes of the round."""
UNSPONSORED_WEIGHT = 2.0**-20
"""The push-sum weight of a joining peer whose sponsor was lost before it gave anything: so small that the peer has the
model of its neighbours after the first round, and not 0, by which z = x / u could not be computed until then."""


@dataclass(frozen=True)
class Transfer:
    """(x, u), or a part of it, that goes from one peer to another at the end of a round."""

    giver: int
    taker: int
    is_all: bool
    """True: all of a leaving peer's; False: a sponsor's part for a joining one."""


def transfers(views: ViewSchedule, t: int, spec: AlgorithmSpec) -> tuple[Transfer, ...]:
    """Return the transfers between round t and the next one."""
    found, push_sum = [], spec.push_sum
    changes = views.membership.changes_at(t + 1)
    if levels(views, t, spec):
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


def levels(views: ViewSchedule, t: int, spec: AlgorithmSpec) -> bool:
    """Return whether all take one model between round t and the next one: the first member tells it to all others."""
    changes = views.membership.changes_at(t + 1)
    return spec.graph is GraphNeed.COMPLETE and any(change.kind is ChangeKind.LOST for change in changes)


def heir_of(views: ViewSchedule, t: int, leaver: int) -> int | None:
    """Return the heir of (x, u) of a peer that leaves after round t: the next of its receivers that stays, else of its
    senders, else of all members; None if nobody stays."""
    before, after = views.membership.members(t), views.membership.members(t + 1)
    stay = [peer for peer in before if peer in after]
    receivers = views.receivers_from(t, leaver, with_absent=True)
    senders = views.senders_from(t, leaver, with_absent=True)
    # Peers that this one treats as absent count: peers know different losses, and all have to name the same heir.
    for group in (receivers, senders, stay):
        candidates = [peer for peer in group if peer in stay]
        if candidates:
            return min(candidates, key=lambda peer: (peer - leaver) % views.num_peers)
    return None


def jumped(moved: Iterable[Transfer], spec: AlgorithmSpec) -> set[int]:
    """Return the peers whose x has jumped. Without push-sum a sponsor keeps all of its x."""
    takers = {each.taker for each in moved}
    return takers | {each.giver for each in moved} if spec.push_sum else takers


def partners(views: ViewSchedule, t: int, peer: int, spec: AlgorithmSpec) -> set[int]:
    """Return the peers beyond its neighbours with which a peer exchanges anything between round t and the next one."""
    moved = transfers(views, t, spec)
    return {each.taker for each in moved if each.giver == peer} | {each.giver for each in moved if each.taker == peer}


def take_back_gifts_(algorithm: Algorithm, gifts: Sequence[Message]) -> None:
    """Return gifts that a lost peer never received to the push-sum peer that gave them."""
    for gift in gifts if algorithm.spec.push_sum else ():
        add_decompressed_(algorithm.x, gift.layers, algorithm.node.layout, 1.0)
        algorithm.u += gift.push_weight


class Boundary:
    """One peer's part in the end of round t: `begin`, then `advance` with each inbox, until there is no exchange."""

    def __init__(self, algorithm: Algorithm, views: ViewSchedule, t: int) -> None:
        self._algorithm, self._views, self._t = algorithm, views, t
        self._replicas, self._me = replicas_of(algorithm), algorithm.node.peer
        self._moved = transfers(views, t, algorithm.spec)
        self._phase = READ_PHASE

    def begin(self) -> Exchange | None:
        """Return the first exchange; None if this peer has no part in the change."""
        algorithm, t = self._algorithm, self._t
        if algorithm.spec.modulo and algorithm.node.modulo.verified:
            # All readers of this peer's codes are read by it too: the graph of a verified algorithm is undirected.
            heard = self._views.receivers_from(t, self._me, with_absent=True)
            neighbors = frozenset(heard) - self._views.absent.keys()
            if neighbors:
                read = Message(MessageKind.NOTHING, self._me, t, READ_PHASE)
                return Exchange(dict.fromkeys(sorted(neighbors), read), neighbors, READ_PHASE)
        return self._shares()

    def _shares(self) -> Exchange | None:
        """Give away this peer's part of the transfers; return their exchange, or the next one where it has none."""
        self._phase = TRANSFER_PHASE
        lost = self._views.absent.keys()
        # A sponsor keeps the share of a peer that was lost before it joined. A leaving peer's mass stays with nobody.
        gifts = [each for each in self._moved if each.giver == self._me and (each.is_all or each.taker not in lost)]
        shares = sum(not each.is_all for each in gifts)
        sends = {}
        for number, gift in enumerate(gifts):
            # A share of the rest each time, so that k joining peers and their sponsor end with the same 1 / (k + 1).
            share = 1.0 if gift.is_all else 1.0 / (shares - number + 1)
            sends[gift.taker] = self._part(share)
        awaits = frozenset(each.giver for each in self._moved if each.taker == self._me)
        if sends or awaits:
            return Exchange(sends, awaits, TRANSFER_PHASE)
        return self._copies()

    def advance(self, inbox: Mapping[int, Message]) -> Exchange | None:
        """Take an inbox; return the next exchange. Raises RemoteProtocolError for an unusable message, and StateError
        if the sponsor was lost before it gave this peer a model: only push-sum can do without one."""
        if self._phase == READ_PHASE:
            return self._shares()
        for message in inbox.values():
            check_message(message, self._algorithm.node.layout)
        if self._phase == COPY_PHASE:
            assert self._replicas is not None
            for message in inbox.values():
                self._replicas.start_copy(message)
            return None
        is_new = self._me not in self._views.membership.members(self._t)
        algorithm = self._algorithm
        if is_new and not inbox:
            if not algorithm.spec.push_sum:
                raise SponsorLost(
                    "the sponsor of this peer was lost before it handed over its model; have another peer remove "
                    "this peer, and join under another entry"
                )
            algorithm.x *= algorithm.x.dtype.type(UNSPONSORED_WEIGHT)
            algorithm.u = UNSPONSORED_WEIGHT
        for _, message in sorted(inbox.items()):
            # A new peer made its (x₀, 1) itself, which must not become part of Σx and Σu. Without push-sum a gift is a
            # whole model, not a part of one.
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
            # A leaving peer keeps the model that it ends with: nobody counts it any more.
            if share < 1.0:
                algorithm.x -= x
                algorithm.u -= u
                algorithm.shrunk_(1.0 - share)
        layers = whole(x.copy(), algorithm.node.layout)
        return Message(MessageKind.GOSSIP, self._me, self._t, TRANSFER_PHASE, 1.0, u, layers)

    def _copies(self) -> Exchange | None:
        """Switch to the edges of the next round; return the exchange of replicas, if any begins here."""
        self._phase = COPY_PHASE
        views, me, t = self._views, self._me, self._t
        views.enter(t + 1)
        self._algorithm.start_anew()
        if self._replicas is None:
            return None
        restart = jumped(self._moved, self._algorithm.spec)
        old_senders, old_receivers = set(views.senders_from(t, me)), set(views.receivers_from(t, me))
        senders, receivers = views.senders_from(t + 1, me), views.receivers_from(t + 1, me)
        if self._algorithm.spec.push_sum and old_receivers:
            self._replicas.keep_own(t + 1)
        self._replicas.change_edges(senders, receivers, t + 1)
        if me in restart:
            self._replicas.restart_own(self._algorithm.x, t + 1)
        copy = replace(self._replicas.own_copy(t), phase=COPY_PHASE)
        sends = {peer: copy for peer in receivers if me in restart or peer not in old_receivers}
        awaits = frozenset(peer for peer in senders if peer in restart or peer not in old_senders)
        return Exchange(sends, awaits, COPY_PHASE) if sends or awaits else None
