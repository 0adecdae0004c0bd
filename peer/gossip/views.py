"""The schedule of one peer while members come and go: the graph of a round is that of the round's members.

The configured kind of graph is built over the *positions* of the members (peers 0, 2 and 3 are positions 0, 1 and 2 of
a ring of three), so that every peer derives the same matrices from the same `Membership`. A peer that is no member has
no edges. Until the round from which a loss counts, the neighbours of the lost peer treat it as absent, each for itself:
the weight of the missing edge stays with its remaining end. On a push-sum graph a column is its sender's own, so that
columns still sum to 1; a symmetric matrix stays symmetric and doubly stochastic.
"""

from __future__ import annotations

from collections.abc import Callable

from peer.gossip.membership import Membership
from peer.gossip.mixing_matrix import MixingMatrix
from peer.gossip.topology import Schedule

GraphOf = Callable[[tuple[int, ...]], Schedule]
"""Members, ascending → the schedule over their positions."""


class ViewSchedule:
    """A `gossip.base.MixingSchedule` for one peer, over the indices of all peers that it knows."""

    def __init__(self, num_peers: int, membership: Membership, graph_of: GraphOf) -> None:
        """`num_peers`: peers known before any newcomer is heard of."""
        self._listed = num_peers
        self.membership = membership
        self._graph_of = graph_of
        self._now = 0
        self._absent: dict[int, int] = {}
        self._matrices: dict[object, MixingMatrix] = {}
        first = membership.members(0)
        self.num_first = len(first)
        """Number of members of round 0: Σu of push-sum, which no change of the members raises."""
        # Ascending and distinct, so that these are all of 0 … num_peers − 1.
        is_everybody = self.num_first == num_peers == first[-1] + 1
        self._all: Schedule | None = graph_of(first) if is_everybody else None
        """The graph of all peers, while no other is in use."""

    @property
    def num_peers(self) -> int:
        """Number of indices: newcomers count from when they are heard of."""
        return max(self._listed, 1 + max(self.membership.newcomers, default=-1))

    def enter(self, t: int) -> None:
        """Make `all_senders` and `all_receivers` those of round t and later rounds with the same members."""
        self._now = t

    def treat_as_absent(self, peer: int, t: int) -> None:
        """Leave a lost peer out from round t on, whether or not the members say so already."""
        self._absent[peer] = t

    @property
    def absent(self) -> dict[int, int]:
        """Lost peer → first round without it here."""
        return dict(self._absent)

    @property
    def spectral_gap(self) -> float:
        """Spectral gap of the graph of the entered round's members."""
        return self._graph_of(self.membership.members(self._now)).spectral_gap

    def members(self, t: int) -> tuple[int, ...]:
        return self.membership.members(t)

    def at(self, t: int) -> MixingMatrix:
        if self._is_plain:
            return self._plain.at(t)
        members = self.membership.members(t)
        graph, absent = self._graph_of(members), self._absent_in(t)
        key = (self.num_peers, members, graph.index(t), absent)
        if key not in self._matrices:
            if len(self._matrices) > 64:
                self._matrices.clear()
            self._matrices[key] = graph.at(t).spread_over(self.num_peers, members).without(absent)
        return self._matrices[key]

    def weight(self, t: int, receiver: int, sender: int) -> float:
        return self.at(t).weight(receiver, sender)

    def senders(self, t: int, peer: int) -> tuple[int, ...]:
        if self._is_plain:
            return self._plain.senders(t, peer)
        return self._others(t, peer, lambda graph, position: graph.senders(t, position))

    def receivers(self, t: int, peer: int) -> tuple[int, ...]:
        if self._is_plain:
            return self._plain.receivers(t, peer)
        return self._others(t, peer, lambda graph, position: graph.receivers(t, position))

    def all_senders(self, peer: int) -> tuple[int, ...]:
        return self.senders_from(self._now, peer)

    def all_receivers(self, peer: int) -> tuple[int, ...]:
        return self.receivers_from(self._now, peer)

    def senders_from(self, t: int, peer: int, *, with_absent: bool = False) -> tuple[int, ...]:
        """Return the senders to `peer` in round t or a later one with the same members, ascending.

        `with_absent`: as the graph has it, which all peers agree on; else without those that are treated as absent.
        """
        if self._is_plain:
            return self._plain.all_senders(peer)
        return self._others(t, peer, lambda graph, position: graph.all_senders(position), with_absent=with_absent)

    def receivers_from(self, t: int, peer: int, *, with_absent: bool = False) -> tuple[int, ...]:
        """Return the receivers of `peer` in round t or a later one with the same members, ascending."""
        if self._is_plain:
            return self._plain.all_receivers(peer)
        return self._others(t, peer, lambda graph, position: graph.all_receivers(position), with_absent=with_absent)

    def lead(self, members: tuple[int, ...]) -> int:
        """Return the most rounds that a peer among these members can be ahead of another."""
        graph = self._graph_of(members)
        return (graph.diameter or len(members)) * max(1, graph.cycle_rounds) + 1

    def is_steady(self, t: int) -> bool:
        """Return whether a peer that reaches round t knows that all others have reached a round with the same members:
        the last change was long enough ago, and the round's graph has no lost peer."""
        members = self.membership.members(t)
        if not {*members}.isdisjoint(self._absent_in(t)):
            return False
        return t >= self.membership.same_since(t) + self.lead(members)

    @property
    def _is_plain(self) -> bool:
        return self._all is not None and self.membership.is_settled and not self._absent

    @property
    def _plain(self) -> Schedule:
        assert self._all is not None
        return self._all

    def _absent_in(self, t: int) -> tuple[int, ...]:
        return tuple(sorted(peer for peer, since in self._absent.items() if t >= since))

    def _others(
        self, t: int, peer: int, ask: Callable[[Schedule, int], tuple[int, ...]], *, with_absent: bool = False
    ) -> tuple[int, ...]:
        members = self.membership.members(t)
        if peer not in members:
            return ()
        absent = () if with_absent else self._absent_in(t)
        found = ask(self._graph_of(members), members.index(peer))
        return tuple(members[position] for position in found if members[position] not in absent)
