"""The members of each round: a first list, and the changes to it since.

A change names its subject and the round from which it counts. Peers pass changes on to each other like rumours, in no
particular order; since the list of a round follows from the *set* of changes alone, sorted by (round, subject, kind),
there is nothing to agree on beyond that everybody has heard of a change before its round begins. Two changes at the
same time need no settling, and nobody coordinates.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypedDict


class ChangeKind(enum.IntEnum):
    """Event that befalls the subject of a change."""

    JOIN = 1
    LEAVE = 2
    LOST = 3


@dataclass(frozen=True)
class Newcomer:
    """Identity of a joining peer that is in nobody's list but its own. Connections need it, rounds do not."""

    name: str
    advertise: str | None
    """Address for dialling it, "host:port"; None if it cannot be dialled."""
    relay: str | None
    """Name of the peer at which it waits for callers, if it cannot be dialled."""
    certificate: bytes
    """DER; empty in a run without certificates."""


@dataclass(frozen=True)
class Change:
    """One change of the members."""

    kind: ChangeKind
    subject: int
    """Peer that joins, leaves or is lost."""
    issuer: int
    """Peer that announces it: the sponsor from which a joining peer gets its first model, the leaving peer itself, or
    any peer that knows that another is lost."""
    effective: int
    """The first round with the new members."""
    heard_round: int = 0
    """For a loss: the last round of which the issuer has a message of the lost peer. Mass that the lost peer got in
    earlier rounds is in its later messages, or lost with it; the rest returns to its senders."""
    newcomer: Newcomer | None = None
    """Identity of a joining peer that not everybody lists."""
    told: bytes = field(default=b"", compare=False, repr=False)
    """Frame that announced it, with the proof of its issuer; empty if there is none."""
    votes: tuple[bytes, ...] = field(default=(), compare=False, repr=False)
    """For a loss that the members declare themselves: the votes of their majority (`node.loss_votes`)."""
    ordered: bytes = field(default=b"", compare=False, repr=False)
    """… or an operator's order."""
    admitted: bytes = field(default=b"", compare=False, repr=False)
    """… or, in any run with certificates, the lost peer's own admission (`node.progress`)."""
    equivocation: tuple[bytes, ...] = field(default=(), compare=False, repr=False)
    """… or two of its own notes that contradict each other (`node.told`)."""

    @property
    def has_grounds(self) -> bool:
        """Whether a loss rests on more than its issuer's word (`node.loss_grounds`)."""
        return bool(self.votes or self.is_certain)

    @property
    def is_certain(self) -> bool:
        """Whether a loss holds whoever is left: by an operator's order, an admission, or a proof that the lost peer
        lied. After votes, the peers left have to be a majority."""
        return bool(self.ordered or self.admitted or self.equivocation)

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Sort key by which changes are applied."""
        return self.effective, self.subject, self.kind, self.issuer


class Grounds(TypedDict, total=False):
    """What a loss rests on: those fields of a `Change` by their names, none or one of them."""

    votes: tuple[bytes, ...]
    ordered: bytes
    admitted: bytes
    equivocation: tuple[bytes, ...]


def members_after(members: tuple[int, ...], kind: ChangeKind, subject: int) -> tuple[int, ...] | None:
    """Return the members after a change; None if it changes nothing, or leaves nobody."""
    if (subject in members) == (kind is ChangeKind.JOIN) or members == (subject,):
        return None
    return tuple(sorted({*members} ^ {subject}))


class Membership:
    """The members of every round, as far as changes are known. Peers that know the same changes see the same."""

    def __init__(self, first: tuple[int, ...], changes: Iterable[Change] = ()) -> None:
        """`first`: the members of round 0, ascending; all peers of a process share it."""
        self._first = first
        self.changes: tuple[Change, ...] = ()
        """All known changes, in the order in which they are applied."""
        self._newcomers: dict[int, Newcomer] = {}
        self._applied: list[Change] = []
        self._timeline: tuple[list[int], list[tuple[int, ...]]] = ([], [self._first])
        """(rounds in which the members change, ascending; members before the first of those rounds, from the first on,
        from the second on, …). Replaced as one: another thread may be reading it."""
        for change in changes:
            self.add(change)

    def add(self, change: Change) -> bool:
        """Note a change; return whether it is news."""
        if change in self.changes:
            return False
        self.changes = tuple(sorted((*self.changes, change), key=lambda each: each.order))
        if change.newcomer is not None:
            self._newcomers.setdefault(change.subject, change.newcomer)
        applied: list[Change] = []
        rounds: list[int] = []
        by_round = [self._first]
        for each in self.changes:
            members = members_after(by_round[-1], each.kind, each.subject)
            if members is None:
                continue  # It joined by another sponsor, or is gone already; or nobody would stay.
            applied.append(each)
            if rounds and rounds[-1] == each.effective:
                by_round[-1] = members
            else:
                rounds.append(each.effective)
                by_round.append(members)
        self._applied, self._timeline = applied, (rounds, by_round)
        return True

    def members(self, t: int) -> tuple[int, ...]:
        """Return the members of round t, ascending."""
        rounds, members = self._timeline
        return members[bisect_right(rounds, t)] if rounds else self._first

    def same_since(self, t: int) -> int:
        """Return the first of the rounds up to t that have the members of round t."""
        rounds, _ = self._timeline
        return [0, *rounds][bisect_right(rounds, t)]

    def rounds_of_change(self, t: int) -> Sequence[int]:
        """Return the rounds up to t with which the members change, the last one first."""
        rounds, _ = self._timeline
        return rounds[: bisect_right(rounds, t)][::-1]

    def last_round_of(self, peer: int, t: int) -> int | None:
        """Return the last of the rounds up to t in which a peer takes part; None if there is none."""
        rounds = (t, *(first - 1 for first in self.rounds_of_change(t)))
        return next((round_ for round_ in rounds if peer in self.members(round_)), None)

    def coming(self, t: int) -> Sequence[tuple[int, ...]]:
        """Return the members of round t, and of every later round in which they change."""
        rounds, members = self._timeline
        return members[bisect_right(rounds, t) :]

    def is_coming(self, peer: int, t: int) -> bool:
        """Whether a peer is a member in round t or in a later one."""
        return any(peer in members for members in self.coming(t))

    def changes_at(self, t: int) -> tuple[Change, ...]:
        """Return the changes that round t is the first to see, in order; those that change nothing are left out."""
        return tuple(change for change in self._applied if change.effective == t)

    def applied_after(self, t: int) -> tuple[Change, ...]:
        """Return the changes that rounds later than t will be the first to see."""
        return tuple(change for change in self._applied if change.effective > t)

    @property
    def newcomers(self) -> Mapping[int, Newcomer]:
        """Peers that joined, or are about to, without being in everybody's list."""
        return MappingProxyType(self._newcomers)

    def was_ever(self, peer: int) -> bool:
        """Whether a peer is, was or will be a member, as far as is known."""
        joins = (change.subject for change in self.changes if change.kind is ChangeKind.JOIN)
        return peer in self._first or peer in joins

    @property
    def is_settled(self) -> bool:
        """Whether nothing has ever changed."""
        return not self.changes

    def state(self) -> list[list[Any]]:
        """Return all changes as JSON values."""
        return [
            [change.kind, change.subject, change.issuer, change.effective, change.heard_round, *_rest(change)]
            for change in self.changes
        ]

    def restore(self, state: Iterable[Sequence[Any]]) -> None:
        """Restore a result of `state`. Raises ValueError or TypeError if it cannot be that."""
        for kind, subject, issuer, effective, heard_round, *rest in state:
            # Earlier releases had no proofs, and wrote nothing where there is no newcomer.
            described, told, votes, ordered, admitted, equivocation = [*rest, *_NO_REST[len(rest) :]]
            newcomer = None
            if described is not None:
                name, advertise, relay, certificate = described
                newcomer = Newcomer(name, advertise, relay, bytes.fromhex(certificate))
            numbers = int(subject), int(issuer), int(effective), int(heard_round)
            grounds = tuple(map(bytes.fromhex, votes)), bytes.fromhex(ordered), bytes.fromhex(admitted)
            proof = tuple(map(bytes.fromhex, equivocation))
            self.add(Change(ChangeKind(kind), *numbers, newcomer, bytes.fromhex(told), *grounds, proof))


_NO_REST: tuple[Any, ...] = (None, "", (), "", "", ())


def _rest(change: Change) -> list[object]:
    """Return as JSON values a newcomer's identity, the frame with the proof, and the grounds of a loss; nothing if
    there are none of these."""
    newcomer, described = change.newcomer, None
    if newcomer is not None:
        described = [newcomer.name, newcomer.advertise, newcomer.relay, newcomer.certificate.hex()]
    if change.has_grounds:
        votes, proof = ([each.hex() for each in said] for said in (change.votes, change.equivocation))
        grounds: list[object] = [votes, change.ordered.hex(), change.admitted.hex(), proof]
        # Earlier releases know nothing of the last two, and read changes without them.
        return [described, change.told.hex(), *grounds[: 4 if proof else 3 if change.admitted else 2]]
    if change.told:
        return [described, change.told.hex()]
    return [] if described is None else [described]
