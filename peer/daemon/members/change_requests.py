"""Changes of the members that somebody asks this peer to announce: the operator, the list of peers, a newcomer.

They wait until the loop has a moment for them, since the participant may only be asked between two of its calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, Unpack

from peer.daemon.local_peer import LocalPeer
from peer.daemon.members.member_links import MemberLinks
from peer.daemon.neighbors import Neighbors
from peer.daemon.notes import notes
from peer.daemon.round_frames import RoundFrames
from peer.daemon.runtime import Runtime
from peer.errors import RemoteProtocolError, SottoError, StateError
from peer.gossip.membership import Change, ChangeKind, Grounds, Newcomer
from peer.node import membership_codec
from peer.node.durable import DurablePeer
from peer.node.membership_planning import plan_change
from peer.records import RoundRecord

log = logging.getLogger("sotto")


@dataclass(frozen=True)
class _Request:
    """A change that somebody asks for."""

    kind: ChangeKind
    subject: int
    answer: asyncio.Future[Change] | None
    """Result for the waiting operator; None if a peer or the list of peers asks."""
    newcomer: Newcomer | None = None
    """The newcomer that asks, if not everybody lists it."""
    grounds: Grounds = field(default_factory=Grounds)
    """Grounds of a loss."""


@dataclass
class ChangeRequests:
    """The requests that wait, and the answers to them."""

    local: LocalPeer
    runtime: Runtime
    neighbors: Neighbors
    member_links: MemberLinks
    durable: DurablePeer
    frames: RoundFrames

    def __post_init__(self) -> None:
        """Begin with no request."""
        self._roster, self._num_peers = self.local.roster, self.local.setup.num_peers
        self._membership = self.durable.participant.membership
        self._waiting: deque[_Request] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def is_gone(self, peer: int) -> bool:
        """Return whether a peer was a member and is none any more."""
        return self._membership.is_gone(peer)

    def losses(self) -> dict[int, bytes]:
        """Return number of a lost peer → the frame that proves to it that it is."""
        return self._membership.proofs_of_loss()

    def standing(self, peer: int) -> str:
        """Return a peer's standing in this run."""
        return self._membership.standing(peer)

    # -- who asks ------------------------------------------------------------------------------------------------------

    async def announce(self, kind: ChangeKind, subject: int, *, ordered: bytes = b"") -> dict[str, object]:
        """Announce a change for the operator; return from when it counts. `ordered`: its signed order, for a loss.
        Raises SottoError with the reason against it."""
        answer: asyncio.Future[Change] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(kind, subject, answer, grounds={"ordered": ordered}))
        self.runtime.wake()
        change = await answer
        return {"name": self._roster.name(subject), "round": self.durable.round, "from": change.effective}

    async def follow_list(self, taken_out: Sequence[str]) -> dict[str, object]:
        """Go on without those that the list of peers names no more, and link to those that it names now."""
        removed: dict[str, object] = {}
        left_to_others: dict[str, str] = {}
        for peer in self.member_links.still_members(taken_out):
            name = self._roster.name(peer)
            try:
                removed[name] = (await self.announce(ChangeKind.LOST, peer))["from"]
            except SottoError as error:
                # The others whose lists change may say so, or an operator; this peer will hear of it from them.
                left_to_others[name] = str(error)
        for name in taken_out:
            self._roster.forget(name)
        self.member_links.add_missing()
        return {"removed": removed, "left_to_others": left_to_others}

    def declare_lost(self, subject: int, **grounds: Unpack[Grounds]) -> None:
        """Ask for going on without a peer that most members have voted for leaving behind, that has admitted the loss
        of its state, or that has signed two stories."""
        if self._membership.is_lost(subject) or any(request.subject == subject for request in self._waiting):
            return
        self._waiting.append(_Request(ChangeKind.LOST, subject, None, grounds=grounds))
        self.runtime.wake()

    def remove_members(self, names: Sequence[str]) -> None:
        """Ask for going on without those that the list of peers lost while this peer was stopped."""
        self._waiting += [_Request(ChangeKind.LOST, peer, None) for peer in self.member_links.still_members(names)]

    def asked_to_sponsor(self, peer: int, note: bytes) -> None:
        """Judge the note of a neighbour that wants to join. Raises RemoteProtocolError if it is malformed."""
        # A peer that takes part again after its loss also introduces itself.
        newcomer = membership_codec.decode_newcomer(note, sender=peer) if peer >= self._num_peers else None
        # One request of a peer is enough, and only one is kept: asking costs it nothing.
        asked_for = {request.subject for request in self._waiting}
        if peer not in asked_for | {change.subject for change in self._membership.coming_changes}:
            self._waiting.append(_Request(ChangeKind.JOIN, peer, None, newcomer))
            self.runtime.wake()

    def leave(self) -> None:
        """Ask for leaving the run, as a limit of the device wants it; not again while that waits."""
        if all(request.kind is not ChangeKind.LEAVE for request in self._waiting):
            self._waiting.append(_Request(ChangeKind.LEAVE, self.durable.participant.peer, None))

    # -- what becomes of it --------------------------------------------------------------------------------------------

    async def grant(self) -> RoundRecord | None:
        """Announce the changes that were asked for, or say why not; return the record of a round that ended because a
        lost peer is waited for no longer. The rest waits until after that round. Raises StateError."""
        record: RoundRecord | None = None
        while self._waiting and record is None:
            request = self._waiting.popleft()
            try:
                change = self._plan(request)
                record = self.frames.perform(await self.runtime.work(self.durable.announce, change, self.runtime.now()))
            except SottoError as error:
                self._refuse(request, error)
                if isinstance(error, StateError):
                    raise
            else:
                if request.answer is not None and not request.answer.done():
                    request.answer.set_result(change)
        return record

    def _plan(self, request: _Request) -> Change:
        if request.newcomer is not None:
            try:
                self._roster.check(request.subject, request.newcomer)
                # A certificate that was revoked is refused by sponsors only: whom one has announced, all accept.
                self._roster.check_today(request.newcomer)
            except SottoError:
                raise
            except Exception as error:  # Raised for what a newcomer says about itself.
                self.neighbors.transport.blame(request.subject, error)
                raise RemoteProtocolError("what it says about itself cannot be checked") from None
        return plan_change(self._membership, request.kind, request.subject, request.newcomer, **request.grounds)

    def _refuse(self, request: _Request, error: SottoError) -> None:
        name = self._roster.name(request.subject)
        if request.answer is not None:
            if not request.answer.done():
                request.answer.set_exception(SottoError(str(error)))
        elif request.kind is ChangeKind.LEAVE:
            log.warning("limits: this peer cannot leave the run now: %s", error)
        elif request.grounds:
            log.info("this peer cannot announce that %s is lost, and leaves it to others: %s", name, error)
        elif request.kind is ChangeKind.LOST:
            log.warning("%s is not in the list any more, and stays a member: %s", name, error)
        else:
            self.neighbors.transport.log.write(log, logging.WARNING, request.subject, "%s cannot join: %s", name, error)
            self.neighbors.transport.bulletin(request.subject, notes.REFUSAL, notes.encode_refusal(str(error)))


class FixedMembers:
    """In place of `ChangeRequests` in a run whose members cannot change."""

    def __init__(self, why: str) -> None:
        """`why`: a sentence that says so."""
        self._why = why

    async def announce(self, kind: ChangeKind, subject: int, *, ordered: bytes = b"") -> dict[str, object]:
        """Raise SottoError."""
        raise SottoError(self._why)

    async def follow_list(self, taken_out: Sequence[str]) -> dict[str, object]:
        """Do nothing: the list may have other addresses, and no other peers."""
        return {}

    def is_gone(self, peer: int) -> bool:
        """Return False."""
        return False

    def losses(self) -> dict[int, bytes]:
        """Return nothing: nobody is lost."""
        return {}

    def standing(self, peer: int) -> str:
        """Return that it is a member."""
        return "member"


Members: TypeAlias = ChangeRequests | FixedMembers
"""Changes of a run's members at an operator's request. Refusals raise SottoError with the reason."""
